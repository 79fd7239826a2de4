// A fake accelerator for PyTorch: several devices that hold real numbers in host memory.
//
// One source, four flavours, chosen with -D at compile time:
//   FAKE_CUDA, FAKE_XPU, FAKE_MPS   take the place of that backend in a torch built for CPUs only
//   (none)                          PrivateUse1, the door that torch keeps for backends of others
//
// No Python headers: the tests steer it through the `extern "C"` functions at the end (ctypes), so
// one library serves every Python that has the same torch.
//
// What makes it worth testing against:
//   * Device addresses are tagged and non-canonical. Kernels below untag them; anything else that
//     reads device memory from the host faults at once instead of working by luck.
//   * Every operator checks that its tensors are on one device, as kernels of a real device do.
//   * Memory is finite, poisoned when it is handed out and when it is given back.
//   * With `async` on, non-blocking copies happen as late as CUDA's rules allow, and accesses of
//     two streams to one block that nothing orders are counted as races.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "native/kernels.h"

namespace {

TORCH_LIBRARY_IMPL(aten, FAKE_KEY, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("unfold", unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_with_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("copy_", copy_);
  m.impl("_nested_view_from_buffer", at::native::_nested_view_from_buffer);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("convolution", convolution);
  m.impl("convolution_backward", convolution_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}
TORCH_LIBRARY_IMPL(_, FAKE_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using Where = std::optional<at::Device>;
using Flag = std::optional<bool>;
using Format = std::optional<at::MemoryFormat>;

// What is made of dense tensors (sparse, nested, quantized): torch's own code works for any device,
// it is only not registered for ours.
TORCH_LIBRARY_IMPL(aten, FAKE_CONCAT(Sparse, FAKE_KEY), m) {
  using namespace at::native;
  m.impl("_sparse_coo_tensor_with_dims_and_tensors",
         +[](int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef size,
             const at::Tensor& indices, const at::Tensor& values, Dtype dtype, Layout layout,
             Where device, Flag pin, Flag coalesced) {
           c10::DeviceGuard guard(values.device());
           return new_with_dims_and_tensor_sparse_symint(sparse_dim, dense_dim, size, indices,
                                                         values, dtype, layout, device, pin,
                                                         coalesced);
         });
  m.impl("_sparse_coo_tensor_with_dims",
         +[](int64_t sparse_dim, int64_t dense_dim, at::IntArrayRef size, Dtype dtype,
             Layout layout, Where device, Flag pin) {
           c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
           return new_with_dims_sparse(sparse_dim, dense_dim, size, dtype, layout, device, pin);
         });
  m.impl("empty.memory_format",
         +[](c10::SymIntArrayRef size, Dtype dtype, Layout layout, Where device, Flag pin,
             Format format) {
           c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
           return empty_sparse_symint(size, dtype, layout, device, pin, format);
         });
  m.impl("sparse_dim", sparse_dim_sparse);
  m.impl("dense_dim", dense_dim_sparse);
  m.impl("_nnz", _nnz_sparse);
  m.impl("_indices", _indices_sparse);
  m.impl("_values", _values_sparse);
  m.impl("indices", indices_sparse);
  m.impl("values", values_sparse);
  m.impl("is_coalesced", is_coalesced_sparse);
  m.impl("_coalesced_", _coalesced_sparse_);
  m.impl("copy_sparse_to_sparse_", copy_sparse_);
  m.impl("copy_", copy_sparse_wrapper_);
  m.impl("clone", clone_sparse);
  m.impl("sparse_resize_", sparse_resize_);
  m.impl("sparse_resize_and_clear_", sparse_resize_and_clear_);
  m.impl("_coalesce", +[](const at::Tensor& t) { return t.cpu().coalesce().to(t.device()); });
}
TORCH_LIBRARY_IMPL(_, FAKE_CONCAT(Sparse, FAKE_KEY), m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback_as<DispatchKey::SparseCPU>>());
}

TORCH_LIBRARY_IMPL(aten, FAKE_CONCAT(SparseCsr, FAKE_KEY), m) {
  using namespace at::native;
  m.impl("sparse_dim", sparse_dim_sparse_csr);
  m.impl("dense_dim", dense_dim_sparse_csr);
  m.impl("_nnz", _nnz_sparse_csr);
  m.impl("values", values_sparse_csr);
  m.impl("crow_indices", crow_indices_sparse_csr);
  m.impl("col_indices", col_indices_sparse_csr);
  m.impl("ccol_indices", ccol_indices_sparse_csr);
  m.impl("row_indices", row_indices_sparse_csr);
  m.impl("empty.memory_format", empty_sparse_compressed_symint);
  m.impl("empty_like", empty_like_sparse_csr);
  m.impl("copy_", copy_sparse_compressed_);
  m.impl("clone", clone_sparse_compressed);
  m.impl("resize_as_sparse_", resize_as_sparse_compressed_);
}
TORCH_LIBRARY_IMPL(_, FAKE_CONCAT(SparseCsr, FAKE_KEY), m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback_as<DispatchKey::SparseCsrCPU>>());
}

TORCH_LIBRARY_IMPL(aten, FAKE_CONCAT(NestedTensor, FAKE_KEY), m) {
  using namespace at::native;
  m.impl("_to_copy", _to_copy_nested);
  m.impl("copy_", copy_nested_);
  m.impl("clone", clone_nested);
  m.impl("empty_like", empty_like_nested);
  m.impl("detach", detach);
  m.impl("alias", alias_nested);
  m.impl("values", values_nested);
  m.impl("unbind.int", NestedTensor_unbind);
  m.impl("is_same_size", nested_is_same_size);
  m.impl("_nested_tensor_size", _nested_tensor_size);
  m.impl("_nested_tensor_strides", _nested_tensor_strides);
  m.impl("_nested_tensor_storage_offsets", _nested_tensor_storage_offsets);
}

TORCH_LIBRARY_IMPL(aten, FAKE_CONCAT(Quantized, FAKE_KEY), m) {
  using namespace at::native;
  m.impl("empty.memory_format", empty_unknown_quantized);
  m.impl("empty_strided", empty_strided_unknown_quantized);
  m.impl("empty_quantized", empty_quantized);
  m.impl("_empty_affine_quantized",
         +[](c10::IntArrayRef size, Dtype dtype, Layout layout, Where device, Flag pin,
             double scale, int64_t zero_point, Format format) {
           c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
           return empty_affine_quantized(size, dtype, layout, device, pin, scale, zero_point,
                                         format);
         });
  m.impl("_empty_per_channel_affine_quantized",
         +[](c10::IntArrayRef size, const at::Tensor& scales, const at::Tensor& zero_points,
             int64_t axis, Dtype dtype, Layout layout, Where device, Flag pin, Format format) {
           c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
           return empty_per_channel_affine_quantized(size, scales, zero_points, axis, dtype,
                                                     layout, device, pin, format);
         });
  m.impl("empty_like", empty_like_quantized);
  m.impl("clone", +[](const at::Tensor& t, Format) {
    return at::empty_quantized(t.sizes(), t, t.options()).copy_(t);
  });
  m.impl("copy_", copy_quantized);
  m.impl("qscheme", qscheme_quant);
  m.impl("q_scale", q_scale_quant);
  m.impl("q_zero_point", q_zero_point_quant);
  m.impl("q_per_channel_scales", at::native::q_per_channel_scales);
  m.impl("q_per_channel_zero_points", at::native::q_per_channel_zero_points);
  m.impl("q_per_channel_axis", at::native::q_per_channel_axis);
  m.impl("as_strided", as_strided_qtensorimpl);
  m.impl("set_.source_Storage_storage_offset", set_storage_quantized_);
  m.impl("int_repr", +[](const at::Tensor& t) { return t.cpu().int_repr().to(t.device()); });
  m.impl("dequantize.self", +[](const at::Tensor& t) {
    return t.cpu().dequantize().to(t.device());
  });
}

#ifndef FAKE_HOOKS  // the others come with torch
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define FAKE_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FAKE_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(FAKE_LOWER_PRECISION)
  AT_FORALL_FP32(FAKE_FP32)
}
#endif

C10_REGISTER_GUARD_IMPL(FAKE_KEY, Guard)

#if defined(FAKE_CUDA)
struct FAKE_HOOKS final : Hooks {
  explicit FAKE_HOOKS(at::CUDAHooksArgs) {}
};
#elif defined(FAKE_HOOKS)
struct FAKE_HOOKS final : Hooks {};
#endif

[[maybe_unused]] const bool g_registered = [] {
  c10::SetAllocator(kType, &g_device_memory);
  at::setHostAllocator(kType, &g_pinned_memory);
#ifndef FAKE_HOOKS
  at::RegisterPrivateUse1HooksInterface(new Hooks);
#endif
  return true;
}();

}  // namespace

#ifdef FAKE_HOOKS
#define FAKE_REGISTER(registry, name) C10_REGISTER_CLASS(registry, name, name)
namespace at {
using ::FAKE_HOOKS;
FAKE_REGISTER(FAKE_CONCAT(FAKE_HOOKS, Registry), FAKE_HOOKS)
}  // namespace at
#endif

// ------------------------------------------------------- what driver.py calls (through ctypes)

extern "C" {
int fake_device_count() { return machine().device_count; }
void fake_set_device_count(int n) {
  machine().device_count = n;
  if (t_device >= n) t_device = 0;
}
int fake_device() { return t_device; }
void fake_set_device(int d) { t_device = d; }

void fake_set_memory(int d, size_t total, size_t others) {
  machine().devices[d].total = total;
  machine().devices[d].others = others;
}
size_t fake_total(int d) { return machine().devices[d].total; }
size_t fake_free(int d) {
  const auto& device = machine().devices[d];
  return device.total - device.used - device.others;
}
size_t fake_used(int d) { return machine().devices[d].used; }
size_t fake_peak(int d) { return machine().devices[d].peak; }
void fake_reset_peak(int d) { g_device_memory.resetPeakStats(static_cast<c10::DeviceIndex>(d)); }

int fake_has_context(int d) { return machine().devices[d].context; }
void fake_set_context(int d, int on) { machine().devices[d].context = on; }

void fake_set_async(int on) { set_async(on); }
int fake_pending(int d) {
  auto guard = lock();
  size_t n = 0;
  for (const auto& [key, stream] : machine().streams)
    if (key.first == d) n += stream.queue.size();
  return static_cast<int>(n);
}
void fake_synchronize(int d) { Guard().synchronizeDevice(static_cast<c10::DeviceIndex>(d)); }
int64_t fake_stream(int d) { return t_stream[d]; }
const char* fake_last_race() { return machine().last_race.c_str(); }

int64_t fake_counter(int i) { return machine().counters[i]; }
void fake_reset_counters() {
  for (auto& counter : machine().counters) counter = 0;
}

void fake_block_op(const char* name, int on) {
  if (on) machine().blocked_ops.insert(name);
  else machine().blocked_ops.erase(name);
}
void fake_unblock_ops() { machine().blocked_ops.clear(); }
void fake_block_float64(int on) {
  constexpr auto bit = [](at::ScalarType t) { return uint64_t(1) << int(t); };
  machine().blocked_dtypes = on ? bit(at::kDouble) | bit(at::kComplexDouble) : 0;
}
void fake_fail(int point, int64_t in, int64_t times) {
  machine().fail_in[point] = in;
  machine().fail_times[point] = times;
}

void fake_seed(int d, uint64_t seed) { default_generator(d).set_current_seed(seed); }
size_t fake_rng_state_size() { return default_generator(0).get_state().nbytes(); }
void fake_get_rng_state(int d, void* out) {
  const auto state = default_generator(d).get_state();
  memcpy(out, state.const_data_ptr(), state.nbytes());
}
void fake_set_rng_state(int d, const void* in) {
  auto state = default_generator(d).get_state();
  memcpy(state.mutable_data_ptr(), in, state.nbytes());
  default_generator(d).set_state(state);
}
}
