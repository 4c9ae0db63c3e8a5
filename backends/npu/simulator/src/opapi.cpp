// Argument objects (aclCreateTensor and related functions), their checks, and the two phases of an aclnn call.
#include "opapi.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

using halsim::fail;
using halsim::Refusal;

namespace halsim {
namespace {

char letter(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return 'f';
    case at::kHalf: return 'h';
    case at::kBFloat16: return 'b';
    case at::kDouble: return 'd';
    case at::kInt: return 'i';
    case at::kLong: return 'l';
    case at::kByte: return 'u';
    case at::kBool: return 'B';
    default: return '?';
  }
}

thread_local bool operands_are_finite = true;

bool finite(const Tensor& t) {
  return !t.defined() || !at::isFloatingType(t.scalar_type()) || at::isfinite(t).all().item<bool>();
}

size_t extent(const aclTensor& t, size_t item) {
  int64_t last = 0;
  for (size_t i = 0; i < t.dims.size(); i++) {
    if (t.dims[i] == 0) return 0;
    last += (t.dims[i] - 1) * t.strides[i];
  }
  return (last + 1) * item;
}

}  // namespace

at::ScalarType scalar_type(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_UINT8: return at::kByte;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_BOOL: return at::kBool;
    default: throw Refusal{kInvalid, "dtype " + std::to_string(static_cast<int>(type)) + " is not simulated"};
  }
}

Tensor tensor(const char* op, const char* name, const aclTensor* value, const char* allowed, bool required) {
  std::string where = std::string(op) + ": " + name;
  if (!value) {
    if (required) throw Refusal{kNullPointer, where + " is a null pointer"};
    return {};
  }
  at::ScalarType type = scalar_type(value->type);
  if (*allowed && !strchr(allowed, letter(type)))
    throw Refusal{kInvalid, where + " has dtype " + c10::toString(type) + ", which the operator does not support"};
  char* data = static_cast<char*>(value->data) + value->offset * c10::elementSize(type);
  size_t bytes = extent(*value, c10::elementSize(type));
  if (bytes && !is_device_memory(data, bytes))
    throw Refusal{kInvalid, where + " is not in device memory"};
  return at::from_blob(data, value->dims, value->strides, at::TensorOptions().dtype(type));
}

std::vector<Tensor> tensors(const char* op, const char* name, const aclTensorList* value) {
  if (!value) throw Refusal{kNullPointer, std::string(op) + ": " + name + " is a null pointer"};
  std::vector<Tensor> result;
  for (const aclTensor* item : value->values) result.push_back(tensor(op, name, item, "", false));
  return result;
}

at::Scalar scalar(const char* op, const char* name, const aclScalar* value) {
  if (!value) throw Refusal{kNullPointer, std::string(op) + ": " + name + " is a null pointer"};
  return value->value;
}

std::vector<at::Scalar> scalars(const char* op, const char* name, const aclScalarList* value) {
  if (!value) throw Refusal{kNullPointer, std::string(op) + ": " + name + " is a null pointer"};
  std::vector<at::Scalar> result;
  for (const aclScalar* item : value->values) result.push_back(item->value);
  return result;
}

std::optional<at::Scalar> optional_scalar(const aclScalar* value) {
  return value ? std::optional<at::Scalar>(value->value) : std::nullopt;
}

std::vector<int64_t> integers(const aclIntArray* value) { return value ? value->values : std::vector<int64_t>{}; }
std::vector<bool> booleans(const aclBoolArray* value) { return value ? value->values : std::vector<bool>{}; }

void write(const Tensor& target, const Tensor& value) {
  if (!target.defined() || !value.defined()) return;
  TORCH_CHECK(target.sizes() == value.sizes(), "the result has shape ", value.sizes(), ", its tensor ", target.sizes());
  if (!saturating() || !at::isFloatingType(target.scalar_type()) || !operands_are_finite) {
    target.copy_(value);
    return;
  }
  Tensor rounded = value.to(target.scalar_type());
  if (!finite(rounded)) {
    raise_overflow_flag();
    rounded = at::nan_to_num(rounded);
  }
  target.copy_(rounded);
}

Operands::Operands(std::initializer_list<const Tensor*> tensors, std::initializer_list<const std::vector<Tensor>*> lists,
                   std::initializer_list<at::Scalar> scalars) {
  if (!saturating()) return;
  for (const Tensor* t : tensors) operands_are_finite &= finite(*t);
  for (const auto* list : lists)
    for (const Tensor& t : *list) operands_are_finite &= finite(t);
  for (const at::Scalar& s : scalars) operands_are_finite &= !s.isFloatingPoint() || std::isfinite(s.toDouble());
}
Operands::~Operands() { operands_are_finite = true; }

int plan(const char* op, uint64_t* workspace, aclOpExecutor** executor, const std::function<Work()>& prepare,
         Wait wait) {
  try {
    *executor = new aclOpExecutor{op, prepare(), wait};
    *workspace = 0;
    return ACL_SUCCESS;
  } catch (const Refusal& refusal) {
    return fail(refusal.code, "%s", refusal.text.c_str());
  } catch (const c10::Error& error) {
    return fail(kInvalid, "%s: %s", op, error.what_without_backtrace());
  }
}

int launch(const char* op, aclrtStream stream, const std::function<Work()>& prepare) {
  uint64_t workspace;
  aclOpExecutor* executor;
  if (int code = plan(op, &workspace, &executor, prepare)) return code;
  return execute(executor, stream);
}

int execute(aclOpExecutor* executor, aclrtStream stream) {
  auto name = executor->name;
  auto work = std::move(executor->run);
  Wait wait = executor->wait;
  delete executor;
  count(Counter::operators);
  if (deterministic) count(Counter::deterministic);
  return submit(stream, [name, work] {
    // Only plain CPU kernels run below: no autograd, and no Python mode of the calling thread.
    at::AutoDispatchBelowADInplaceOrView plain;
    c10::impl::ExcludeDispatchKeyGuard no_python(
        c10::DispatchKeySet{c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
    try {
      work();
      return static_cast<int>(ACL_SUCCESS);
    } catch (const Stopped& stopped) {
      return stopped.code;
    } catch (const c10::Error& error) {
      return fail(kInnerError, "%s: %s", name.c_str(), error.what_without_backtrace());
    } catch (const std::exception& error) {
      return fail(kInnerError, "%s: %s", name.c_str(), error.what());
    }
  }, wait);
}

}  // namespace halsim

extern "C" {

aclTensor* aclCreateTensor(const int64_t* dims, uint64_t count, aclDataType type, const int64_t* strides,
                           int64_t offset, aclFormat, const int64_t*, uint64_t, void* data) {
  return new aclTensor{{dims, dims + count}, {strides, strides + count}, offset, type, data, {}};
}
int aclDestroyTensor(const aclTensor* value) { return delete value, ACL_SUCCESS; }

aclScalar* aclCreateScalar(void* value, aclDataType type) {
  switch (type) {
    case ACL_DOUBLE: return new aclScalar{*static_cast<double*>(value)};
    case ACL_FLOAT: return new aclScalar{*static_cast<float*>(value)};
    case ACL_FLOAT16: return new aclScalar{static_cast<float>(*static_cast<at::Half*>(value))};
    case ACL_BF16: return new aclScalar{static_cast<float>(*static_cast<at::BFloat16*>(value))};
    case ACL_INT64: return new aclScalar{*static_cast<int64_t*>(value)};
    case ACL_INT32: return new aclScalar{static_cast<int64_t>(*static_cast<int32_t*>(value))};
    case ACL_BOOL: return new aclScalar{*static_cast<bool*>(value)};
    default: fail(halsim::kInvalid, "aclCreateScalar: dtype %d", static_cast<int>(type)); return nullptr;
  }
}
int aclDestroyScalar(const aclScalar* value) { return delete value, ACL_SUCCESS; }

aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) { return new aclIntArray{{values, values + count}}; }
int aclDestroyIntArray(const aclIntArray* value) { return delete value, ACL_SUCCESS; }
aclFloatArray* aclCreateFloatArray(const float* values, uint64_t count) {
  return new aclFloatArray{{values, values + count}};
}
int aclDestroyFloatArray(const aclFloatArray* value) { return delete value, ACL_SUCCESS; }
aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t count) {
  // Parentheses, because braces would convert the two pointers to bools.
  return new aclBoolArray{std::vector<bool>(values, values + count)};
}
int aclDestroyBoolArray(const aclBoolArray* value) { return delete value, ACL_SUCCESS; }

// A list owns its members: destroying the list destroys them.
aclTensorList* aclCreateTensorList(const aclTensor* const* values, uint64_t count) {
  return new aclTensorList{{values, values + count}};
}
int aclDestroyTensorList(const aclTensorList* list) {
  for (const aclTensor* value : list->values) delete value;
  return delete list, ACL_SUCCESS;
}
aclScalarList* aclCreateScalarList(const aclScalar* const* values, uint64_t count) {
  return new aclScalarList{{values, values + count}};
}
int aclDestroyScalarList(const aclScalarList* list) {
  for (const aclScalar* value : list->values) delete value;
  return delete list, ACL_SUCCESS;
}
int aclDestroyAclOpExecutor(aclOpExecutor* executor) { return delete executor, ACL_SUCCESS; }

int aclGetViewShape(const aclTensor* value, int64_t** dims, uint64_t* count) {
  const auto& shape = value->result_dims.empty() ? value->dims : value->result_dims;
  *count = shape.size();
  *dims = new int64_t[shape.size()];
  std::copy(shape.begin(), shape.end(), *dims);
  return ACL_SUCCESS;
}

}  // extern "C"
