// Kernels that compute: on the CPU, after the checks and in the order of a real device.
#pragma once

#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include "tensors.h"

namespace {

[[noreturn]] void mixed_devices(c10::Device a, c10::Device b, const std::string& op) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two ",
              "devices, ", a, " and ", b, "! (when checking argument in method ", op, ")");
  __builtin_unreachable();
}

// Work on the current stream of a device: what was queued there comes first, and the copies that
// it makes inside are not transfers.
class Kernel {
 public:
  explicit Kernel(int d)
      : guard_(c10::Device(kType, static_cast<c10::DeviceIndex>(d))),
        stream_(current_stream(d)),
        nested_(t_in_kernel) {
    if (!nested_) {
      drain(stream_);
      auto guard = lock();
      if (machine().async) issue(stream_);
    }
    t_in_kernel = true;
  }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  ~Kernel() { t_in_kernel = nested_; }
  void uses(const at::Tensor& t, bool writes = false) const {
    if (!nested_) touch(t, stream_, writes);
  }

 private:
  c10::DeviceGuard guard_;
  StreamKey stream_;
  bool nested_;
};

using Maybe = const std::optional<at::Tensor>&;

// The frame of a kernel that is written out below: checks its tensors, computes on host views.
class Compute {
 public:
  Compute(const char* name, std::initializer_list<at::Tensor> tensors)
      : device_(tensors.begin()->device()), kernel_(device_.index()) {
    for (const auto& t : tensors) {
      if (!t.defined()) continue;
      if (t.device() != device_) mixed_devices(device_, t.device(), name);
      kernel_.uses(t);
    }
  }
  at::Tensor up(const at::Tensor& t) const { return t.defined() ? t.to(device_) : t; }

 private:
  c10::Device device_;
  Kernel kernel_;
};

at::Tensor value(Maybe t) { return t ? *t : at::Tensor(); }
bool given(Maybe t) { return t && t->defined(); }
std::optional<at::Tensor> host_view(Maybe t) {
  return given(t) ? std::optional(host_view(*t)) : std::nullopt;
}

// Which convolution the CPU would pick is none of a device's business, so torch asks the device
// for ones that the CPU does not have: computed here from the public operator instead.
at::Tensor convolution(const at::Tensor& x, const at::Tensor& w, Maybe b, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  Compute on("convolution", {x, w, value(b)});
  return on.up(at::convolution(host_view(x), host_view(w), host_view(b), stride, padding, dilation,
                               transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w, at::OptionalIntArrayRef,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Compute on("convolution_backward", {grad, x, w});
  const std::vector<int64_t> bias{transposed ? w.size(1) * groups : w.size(0)};
  auto [dx, dw, db] = at::convolution_backward(host_view(grad), host_view(x), host_view(w), bias,
                                               stride, padding, dilation, transposed,
                                               output_padding, groups, mask);
  return {on.up(dx), on.up(dw), on.up(db)};
}

// torch asks every device for fused cells of LSTM and GRU, which the CPU does not have either.
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates,
                                                         const at::Tensor& hidden_gates,
                                                         const at::Tensor& cx, Maybe input_bias,
                                                         Maybe hidden_bias) {
  Compute on("lstm_cell", {input_gates, hidden_gates, cx, value(input_bias), value(hidden_bias)});
  auto gates = host_view(input_gates) + host_view(hidden_gates);
  if (given(input_bias)) gates = gates + host_view(*input_bias) + host_view(*hidden_bias);
  const auto c = gates.chunk(4, 1);
  const auto i = c[0].sigmoid(), f = c[1].sigmoid(), g = c[2].tanh(), o = c[3].sigmoid();
  const auto cy = f * host_view(cx) + i * g;
  return {on.up(o * cy.tanh()), on.up(cy), on.up(at::cat({i, f, g, o}, 1))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    Maybe grad_hy, Maybe grad_cy, const at::Tensor& cx, const at::Tensor& cy,
    const at::Tensor& workspace, bool has_bias) {
  Compute on("lstm_cell_backward", {cx, cy, workspace, value(grad_hy), value(grad_cy)});
  const auto c = host_view(workspace).chunk(4, 1);
  const auto &i = c[0], &f = c[1], &g = c[2], &o = c[3];
  const auto t = host_view(cy).tanh();
  const auto dh = given(grad_hy) ? host_view(*grad_hy) : at::zeros_like(t);
  const auto dc = (given(grad_cy) ? host_view(*grad_cy) : at::zeros_like(t)) + dh * o * (1 - t * t);
  const auto gates = at::cat({dc * g * i * (1 - i), dc * host_view(cx) * f * (1 - f),
                              dc * i * (1 - g * g), dh * t * o * (1 - o)}, 1);
  return {on.up(gates), on.up(dc * f), has_bias ? on.up(gates.sum(0)) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates,
                                            const at::Tensor& hidden_gates, const at::Tensor& hx,
                                            Maybe input_bias, Maybe hidden_bias) {
  Compute on("gru_cell", {input_gates, hidden_gates, hx, value(input_bias), value(hidden_bias)});
  auto ig = host_view(input_gates), hg = host_view(hidden_gates);
  if (given(input_bias)) {
    ig = ig + host_view(*input_bias);
    hg = hg + host_view(*hidden_bias);
  }
  const auto ci = ig.chunk(3, 1), ch = hg.chunk(3, 1);
  const auto h = host_view(hx), r = (ci[0] + ch[0]).sigmoid(), z = (ci[1] + ch[1]).sigmoid();
  const auto n = (ci[2] + r * ch[2]).tanh();
  return {on.up((h - n) * z + n), on.up(at::cat({r, z, n, h, ch[2]}, 1))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& grad_hy, const at::Tensor& workspace, bool has_bias) {
  Compute on("gru_cell_backward", {grad_hy, workspace});
  const auto c = host_view(workspace).chunk(5, 1);
  const auto &r = c[0], &z = c[1], &n = c[2], &h = c[3], &hn = c[4];
  const auto g = host_view(grad_hy), dn = g * (1 - z) * (1 - n * n);
  const auto dz = g * (h - n) * z * (1 - z), dr = dn * hn * r * (1 - r);
  const auto gi = at::cat({dr, dz, dn}, 1), gh = at::cat({dr, dz, dn * r}, 1);
  const auto none = at::Tensor();
  return {on.up(gi), on.up(gh), on.up(g * z), has_bias ? on.up(gi.sum(0)) : none,
          has_bias ? on.up(gh.sum(0)) : none};
}

template <class F>
void for_each_tensor(const c10::IValue& v, F&& f) {  // f(tensor, is it one of an index list)
  if (v.isTensor()) f(v.toTensor(), false);
  else if (v.isTensorList())
    for (const at::Tensor& t : v.toTensorVector()) f(t, false);
  else if (v.isOptionalTensorList())
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector())
      if (t) f(*t, true);
}

// Everything else: checked as kernels of a real device check, then computed by the CPU's kernel.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  TORCH_CHECK_NOT_IMPLEMENTED(!machine().blocked_ops.count(schema.name()), "Could not run '",
                              schema.operator_name(), "' with arguments from the '", FAKE_NAME,
                              "' backend.");
  count(FALLBACK);
  const auto& arguments = schema.arguments();
  const size_t base = stack->size() - arguments.size();

  std::optional<c10::Device> common;
  for (size_t i = base; i < stack->size(); i++) {
    for_each_tensor((*stack)[i], [&](const at::Tensor& t, bool is_index) {
      if (!t.defined()) return;
      // Scalars, and index tensors of x[i], may stay on the CPU.
      if (t.is_cpu() && (t.dim() == 0 || is_index)) return;
      if (!common) common = t.device();
      if (*common != t.device()) mixed_devices(*common, t.device(), schema.name());
    });
  }
  const int d = common && common->type() == kType ? common->index() : t_device;

  Kernel kernel(d);
  at::Generator ours, cpus;  // the CPU's kernel wants a generator of the CPU: lend it the state
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& v = (*stack)[base + i];
    const auto* annotation = arguments[i].alias_info();
    for_each_tensor(v, [&](const at::Tensor& t, bool) {
      kernel.uses(t, annotation && annotation->isWrite());
    });
    if (arguments[i].name() != "generator") continue;
    ours = v.isNone() ? default_generator(d) : v.toGenerator();
    TORCH_CHECK(ours.device().type() == kType, "Expected a '", kType,
                "' device type for generator but found '", ours.device().type(), "'");
    cpus = at::detail::createCPUGenerator();
    cpus.set_state(ours.get_state());
    v = cpus;
  }
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
  if (ours.defined()) ours.set_state(cpus.get_state());
}

template <c10::DispatchKey on_cpu>
void fallback_as(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Kernel kernel(t_device);
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true, on_cpu);
}
using c10::DispatchKey;

}  // namespace
