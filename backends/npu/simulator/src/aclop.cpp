// The operators that torch_npu calls only through the older aclop path on this chip. libascendcl collects the arguments
// of a call and passes them here; it refuses other operators by name.
#include "aclop.h"

#include <map>

#include "kernels.h"
#include "rules.h"

namespace halsim {
namespace {

Tensor operand(const aclTensorDesc& desc, const aclDataBuffer& buffer, const std::string& op, size_t index) {
  if (desc.type == ACL_DT_UNDEFINED) return {};  // an omitted optional operand
  size_t bytes = c10::elementSize(scalar_type(desc.type)) * c10::multiply_integers(desc.dims);
  if (bytes && !desc.on_host && !is_device_memory(buffer.data, bytes))
    throw Refusal{kInvalid, op + ": operand " + std::to_string(index) + " is not in device memory"};
  return at::from_blob(buffer.data, desc.dims, at::TensorOptions().dtype(scalar_type(desc.type)));
}

using Arrays = std::vector<Tensor>;
using Kernel = std::function<void(const Arrays& in, const Arrays& out, const aclopAttr& attr)>;

struct Served {
  Kernel kernel;
  Kernel rule = nullptr;  // throws Refusal for a call that the operator does not accept
};

double number(const Tensor& x) { return x.item().toDouble(); }

// Inputs var, m, v, beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad; the operator multiplies
// the powers by beta itself, so a caller passes beta to the power of step - 1.
void apply_adam_w(const Arrays& in, const Arrays& out, const aclopAttr& attr) {
  double beta1 = number(in.at(7)), beta2 = number(in.at(8));
  for (int i = 0; i < 3; i++)
    if (out.at(i).data_ptr() != in.at(i).data_ptr()) out[i].copy_(in[i]);
  kernels::adamw(out[0], out[1], out[2], in.at(10), number(in.at(3)) * beta1, number(in.at(4)) * beta2, number(in.at(5)),
                 beta1, beta2, number(in.at(6)), number(in.at(9)), attr.flag("amsgrad"), attr.flag("maximize"));
}

// Inputs: x, the padding before and after each dimension (int, flat), and the value to pad with (0 if omitted).
void pad(const Arrays& in, const Arrays& out, const aclopAttr&) {
  Tensor amounts = in.at(1).to(at::kLong).flatten(), inside = out.at(0);
  if (in.size() > 2 && in[2].defined())
    inside.fill_(in[2].item());
  else
    inside.zero_();
  for (int64_t d = 0; d < in.at(0).dim(); d++)
    inside = inside.narrow(d, amounts[2 * d].item<int64_t>(), in[0].size(d));
  inside.copy_(in[0]);
}

template <Tensor (*function)(const Tensor&)>
void unary(const Arrays& in, const Arrays& out, const aclopAttr&) {
  write(out.at(0), function(in.at(0)));
}

template <Tensor (*function)(const Tensor&, const Tensor&)>
void binary(const Arrays& in, const Arrays& out, const aclopAttr&) {
  write(out.at(0), function(in.at(0), in.at(1)));
}

const std::map<std::string, Served>& table() {
  static const std::map<std::string, Served> by_name = {
      {"ApplyAdamW", {apply_adam_w}},
      {"ScaledMaskedSoftmax",
       {[](const Arrays& in, const Arrays& out, const aclopAttr& attr) {
          write(out.at(0), kernels::scaled_masked_softmax(in.at(0), in.at(1), attr.real("scale", 1)));
        },
        [](const Arrays& in, const Arrays&, const aclopAttr& attr) {
          rules::scaled_masked_softmax("ScaledMaskedSoftmax", in.at(0), in.at(1), attr.flag("fixed_triu_mask"));
        }}},
      {"ScaledMaskedSoftmaxGrad",
       {[](const Arrays& in, const Arrays& out, const aclopAttr& attr) {
          write(out.at(0), kernels::scaled_masked_softmax_backward(in.at(0), in.at(1), in.at(2), attr.real("scale", 1)));
        },
        [](const Arrays& in, const Arrays&, const aclopAttr& attr) {
          rules::scaled_masked_softmax("ScaledMaskedSoftmaxGrad", in.at(0), in.at(2), attr.flag("fixed_triu_mask"));
        }}},
      // Inputs: the dimensions and the value. PadV3 and Fill serve object collectives, whose tensors have arbitrary
      // sizes.
      {"Fill", {[](const Arrays& in, const Arrays& out, const aclopAttr&) { out.at(0).fill_(in.at(1).item()); }}},
      {"PadV3", {pad}},
      // torch_npu 2.6 calls these through aclop, 2.13 through aclnn. Bitwise operators on bool have names of their own.
      {"FastGelu", {unary<kernels::fast_gelu>}},
      {"FastGeluGrad", {binary<kernels::fast_gelu_backward>}},
      {"RightShift", {binary<at::bitwise_right_shift>}},
      {"LeftShift", {binary<at::bitwise_left_shift>}},
      {"BitwiseXor", {binary<at::bitwise_xor>}},
      {"BitwiseAnd", {binary<at::bitwise_and>}},
      {"BitwiseOr", {binary<at::bitwise_or>}},
      {"LogicalAnd", {binary<at::logical_and>}},
      {"LogicalOr", {binary<at::logical_or>}},
      {"NotEqual", {binary<at::ne>}},
      {"NPUGetFloatStatusV2", {[](const Arrays&, const Arrays& out, const aclopAttr&) { out.at(0).fill_(overflow_flag()); }}},
      {"NPUClearFloatStatusV2", {[](const Arrays&, const Arrays&, const aclopAttr&) { lower_overflow_flag(); }}},
  };
  return by_name;
}

int run(const char* name, const AclopArguments& arguments, aclrtStream stream) {
  auto entry = table().find(name);
  if (entry == table().end()) return kNotServed;
  aclopAttr attr = arguments.attr ? *arguments.attr : aclopAttr{};
  return launch(name, stream, [&]() -> Work {
    Arrays in, out;
    for (size_t i = 0; i < arguments.inputs.size(); i++)
      in.push_back(operand(*arguments.inputs[i], *arguments.input_data[i], name, i));
    for (size_t i = 0; i < arguments.outputs.size(); i++)
      out.push_back(operand(*arguments.outputs[i], *arguments.output_data[i], name, i));
    Kernel kernel = entry->second.kernel;
    if (entry->second.rule) entry->second.rule(in, out, attr);
    // Host operands belong to the caller, who may free them once the call returns.
    for (size_t i = 0; i < in.size(); i++)
      if (arguments.inputs[i]->on_host) in[i] = in[i].clone();
    return [=] { kernel(in, out, attr); };
  });
}

const bool registered = (serve_aclop(run), true);

}  // namespace
}  // namespace halsim
