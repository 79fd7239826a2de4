// Kernels that make, view and copy tensors.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/NativeFunctions.h>
#include <ATen/TensorUtils.h>
#include <ATen/quantized/Quantizer.h>

#include "devices.h"

namespace {

void check_dtype(std::optional<at::ScalarType> dtype) {
  const auto type = c10::dtype_or_default(dtype);
  if (!(machine().blocked_dtypes >> int(type) & 1)) return;
  const char* name = type == at::kDouble ? "float64" : c10::toString(type);
  TORCH_CHECK_TYPE(false, "Cannot convert a ", FAKE_NAME, " Tensor to ", name, " dtype as the ",
                   FAKE_NAME, " framework doesn't support ", name,
                   ". Please use float32 instead.");
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  check_dtype(dtype);
  c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_generic(size, &g_device_memory, c10::DispatchKeySet(kKey),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  check_dtype(dtype);
  c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(size, stride, &g_device_memory,
                                           c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

at::Tensor alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                 int64_t offset) {
  auto t = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW,
                                                    c10::Storage(self.storage()), self.key_set(),
                                                    self.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return t;
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  const int64_t start = offset.value_or(self.storage_offset());
  const auto need =
      at::detail::computeStorageNbytes(size, stride, self.dtype().itemsize(), start);
  TORCH_CHECK(need <= self.storage().nbytes(), "as_strided: out of bounds for storage of size ",
              self.storage().nbytes());
  return alias(self, size, stride, start);
}

at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return alias(self, size, stride, self.storage_offset());
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) {
  const auto inferred = at::infer_size_dv(size, self.numel());
  const auto stride = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(stride.has_value(),
              "view size is not compatible with input tensor's size and stride (at least one "
              "dimension spans across two contiguous subspaces). Use .reshape(...) instead.");
  return alias(self, inferred, *stride, self.storage_offset());
}

void resize_storage(c10::StorageImpl* s, size_t n) {
  c10::DeviceGuard guard(s->device());
  drain(current_stream(t_device));
  auto fresh = g_device_memory.allocate(n);
  const size_t keep = std::min(n, s->nbytes());
  if (keep) memcpy(untag(fresh.get()), untag(s->data()), keep);
  s->set_data_ptr_noswap(std::move(fresh));
  s->set_nbytes(n);
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  if (self.sizes() == size && !format) return self;
  auto* impl = self.unsafeGetTensorImpl();
  const size_t need = at::detail::computeStorageNbytesContiguous(size, self.dtype().itemsize(),
                                                                 self.storage_offset());
  if (need > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), need);
  impl->set_sizes_contiguous(size);
  if (format) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_with_offset(at::Tensor& self, at::Storage storage, int64_t offset,
                            at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(storage.device() == self.device(), "Attempted to set the storage of a tensor on ",
              "device \"", self.device(), "\" to a storage on different device \"",
              storage.device(), "\". This is no longer allowed; the devices must match.");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data()) impl->set_sizes_and_strides(size, stride, offset);
  else impl->set_sizes_contiguous(size);
  const size_t need = at::detail::computeStorageNbytes(self.sizes(), self.strides(),
                                                       self.dtype().itemsize(), offset);
  if (self.numel() && need > self.storage().nbytes())
    resize_storage(self.storage().unsafeGetStorageImpl(), need);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  const auto n = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_with_offset(self, std::move(storage), 0, {n}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_with_offset(self, source.storage(), source.storage_offset(), source.sizes(),
                         source.strides());
}

// Copies

bool on_device(const at::Tensor& t) { return t.device().type() == kType; }

// A CPU tensor over the same bytes; of a quantized one, over its integers.
at::Tensor host_view(const at::Tensor& t) {
  if (!on_device(t) && !t.is_quantized()) return t;
  auto v = at::from_blob(on_device(t) ? untag(t.const_data_ptr()) : t.data_ptr(), t.sizes(),
                         t.strides(), at::dtype(c10::toUnderlying(t.scalar_type())));
  v._set_conj(t.is_conj());
  v._set_neg(t.is_neg());
  return v;
}

at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  const auto v = host_view(self).unfold(dim, size, step);
  return alias(self, v.sizes(), v.strides(), self.storage_offset());
}

void poison(const at::Tensor& t) {  // what a reader who does not wait may find
  if (t.is_non_overlapping_and_dense()) memset(untag(t.data_ptr()), kPoison, t.nbytes());
}

// Copies between devices work on the current streams of both, each ordered after the other.
void copy_on_devices(const at::Tensor& dst, const at::Tensor& src) {
  auto guard = lock();
  const auto from = current_stream(src.device().index());
  const auto to = current_stream(dst.device().index());
  drain(from);
  drain(to);
  if (machine().async) {
    auto& streams = machine().streams;
    issue(to);
    merge(streams[from].clock, streams[to].clock);
    issue(from);
    touch(src, from, /*writes=*/false);
    touch(dst, from, /*writes=*/true);
    merge(streams[to].clock, streams[from].clock);
  }
  host_view(dst).copy_(host_view(src));
}

void copy_and_wait(const at::Tensor& dst, const at::Tensor& src) {
  auto guard = lock();
  const auto stream = current_stream((on_device(dst) ? dst : src).device().index());
  drain(stream);
  if (machine().async) {
    issue(stream);
    touch(src, stream, /*writes=*/false);
    touch(dst, stream, /*writes=*/true);
  }
  host_view(dst).copy_(host_view(src));
  wait_for(stream);
}

// Puts the copy into the queue of the stream: it reads its source when it runs, as an engine does.
void copy_later(const at::Tensor& dst, const at::Tensor& src, bool staged) {
  auto guard = lock();
  const auto& there = on_device(dst) ? dst : src;
  auto block = block_of(there);
  const auto stream = current_stream(there.device().index());
  if (on_device(dst) && block->queued.count(stream)) drain(stream);  // poison must not overtake
  const auto number = issue(stream);
  touch(src, stream, /*writes=*/false);
  touch(dst, stream, /*writes=*/true);
  poison(dst);
  block->queued.insert(stream);
  // Aliases, not the tensors themselves: those may hold Python objects, to be let go of with the
  // interpreter's lock only.
  const auto view = host_view(src);
  auto from = on_device(src) ? view : staged ? view.clone() : view.alias();
  auto to = host_view(dst).alias();
  auto& queue = machine().streams[stream].queue;
  queue.push_back({number, [=, host = (on_device(dst) ? src : dst).storage()] {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
    block->queued.erase(block->queued.find(stream));  // one of them, not all
  }});
}

// CUDA copies asynchronously from and to page-locked memory. Pageable memory is staged on the way
// up (safe to overwrite at once, not there yet) and waited for on the way down. MPS shares its
// memory and copies from and to any.
bool goes_later(const at::Tensor& dst, const at::Tensor& host, bool non_blocking) {
  if (!machine().async || !non_blocking || dst.numel() == 0) return false;
  return on_device(dst) || kType == c10::DeviceType::MPS || is_pinned(host.const_data_ptr());
}

at::Tensor& copy_(at::Tensor& dst, const at::Tensor& src, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (dst.is_same(src)) return dst;
  if (t_in_kernel) {
    host_view(dst).copy_(host_view(src));
    return dst;
  }
  const bool up = on_device(dst), down = on_device(src);
  TORCH_CHECK((up || dst.is_cpu()) && (down || src.is_cpu()), "unsupported copy from ",
              src.device(), " to ", dst.device());
  fail_if_due(AT_COPY, (up ? dst : src).device().index(), dst.nbytes());
  count(up && down ? (dst.device() == src.device() ? D2D : P2P) : up ? H2D : D2H);
  if (non_blocking) count(NON_BLOCKING);
  const auto& host = up ? src : dst;
  if (up && down) copy_on_devices(dst, src);
  else if (!goes_later(dst, host, non_blocking)) copy_and_wait(dst, src);
  else copy_later(dst, src, kType != c10::DeviceType::MPS && !is_pinned(host.const_data_ptr()));
  return dst;
}

at::Tensor& copy_quantized(at::Tensor& dst, const at::Tensor& src, bool non_blocking) {
  TORCH_CHECK(dst.is_quantized() && dst.dtype() == src.dtype(), "unsupported copy from ",
              src.dtype(), " to ", dst.dtype());
  at::set_quantizer_(dst, src.quantizer());
  return copy_(dst, src, non_blocking);
}

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  at::Tensor target = dst;
  copy_(target, src, non_blocking);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  if (dst.sizes() != src.sizes()) dst.resize_(src.sizes());
  return copy_from(src, dst, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const auto stream = current_stream(self.device().index());
  count(SYNC);
  touch(self, stream, /*writes=*/false);
  wait_for(stream);
  return host_view(self).item();
}

void record_stream(at::Tensor& self, at::Stream s) {
  g_device_memory.recordStream(self.storage().data_ptr(), s);
}

}  // namespace
