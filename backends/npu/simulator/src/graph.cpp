// Operators of CANN's graphs, which torch_npu 2.6 registers when it is loaded. Nothing is kept, because graphs are
// not simulated.
#include <graph/operator.h>
#include <graph/operator_factory.h>

namespace ge {

AscendString::AscendString(const char*) {}
OperatorCreatorRegister::OperatorCreatorRegister(const char*, const OpCreatorV2&) {}
Operator::Operator(const char*, const char*) {}
Operator::Operator(const AscendString&, const AscendString&) {}
void Operator::AttrRegister(const char*, bool) {}
void Operator::AttrRegister(const char*, int64_t) {}
void Operator::InputRegister(const char*) {}
void Operator::OutputRegister(const char*) {}
void Operator::RequiredAttrRegister(const char*) {}
void Operator::DynamicInputRegister(const char*, const unsigned int, bool) {}
void Operator::DynamicInputRegisterByIndex(const char*, const unsigned int, size_t) {}

}  // namespace ge
