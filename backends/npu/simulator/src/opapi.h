// libopapi: the argument objects of aclnn operators as ATen objects, and the two-phase call. Phase one
// (GetWorkspaceSize) decodes and checks the arguments and may refuse the call with the library's error code; phase two
// submits the work to the stream. Results are written only through write(), which checks their shape.
#pragma once
#include <ATen/ATen.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime.h"

struct aclTensor {
  std::vector<int64_t> dims, strides;
  int64_t offset;
  aclDataType type;
  void* data;
  std::vector<int64_t> result_dims;  // the result shape of a data-dependent operator (aclGetViewShape)
};
struct aclScalar {
  at::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclTensorList {
  std::vector<const aclTensor*> values;
};
struct aclScalarList {
  std::vector<const aclScalar*> values;
};
struct aclOpExecutor {
  std::string name;
  std::function<void()> run;
  halsim::Wait wait;
};

namespace halsim {
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Work = std::function<void()>;

constexpr int kNullPointer = 161001;     // ACLNN_ERR_PARAM_NULLPTR
constexpr int kInvalid = 161002;         // ACLNN_ERR_PARAM_INVALID
constexpr int kInnerError = 561103;      // ACLNN_ERR_INNER_NULLPTR's family: the operator itself failed

// A call the library does not accept: thrown in phase one, returned as its code with its text.
struct Refusal {
  int code;
  std::string text;
};
// Thrown by work that ends its stream with this code, whose text fail() has recorded.
struct Stopped {
  int code;
};

at::ScalarType scalar_type(aclDataType type);
// `allowed` is a set of dtype letters (see operators.table), empty = any; throws Refusal.
Tensor tensor(const char* op, const char* name, const aclTensor* value, const char* allowed, bool required);
std::vector<Tensor> tensors(const char* op, const char* name, const aclTensorList* value);
at::Scalar scalar(const char* op, const char* name, const aclScalar* value);
std::vector<at::Scalar> scalars(const char* op, const char* name, const aclScalarList* value);
std::optional<at::Scalar> optional_scalar(const aclScalar* value);
std::vector<int64_t> integers(const aclIntArray* value);
std::vector<bool> booleans(const aclBoolArray* value);

// target.copy_(value), after checking that the shapes are the same; an undefined target discards the value. In
// saturation mode a value beyond the range becomes the largest number, NaN becomes 0, and the overflow flag is set.
void write(const Tensor& target, const Tensor& value);

// While an object of this type exists on this thread, results may be infinite or NaN because an operand is; that is not
// counted as an overflow.
struct Operands {
  Operands(std::initializer_list<const Tensor*> tensors, std::initializer_list<const std::vector<Tensor>*> lists,
           std::initializer_list<at::Scalar> scalars);
  ~Operands();
};

// Runs `prepare` (phase one) and stores the work it returns in *executor. wait: whether it waits for other processes.
int plan(const char* op, uint64_t* workspace, aclOpExecutor** executor, const std::function<Work()>& prepare,
         Wait wait = Wait::never);
int execute(aclOpExecutor* executor, aclrtStream stream);
// Both phases in one, for operators that have only one call.
int launch(const char* op, aclrtStream stream, const std::function<Work()>& prepare);
}  // namespace halsim
