// The argument objects of the older operator path, shared by libascendcl, which creates them, and libopapi, which runs
// the operators of that path.
#pragma once
#include <acl/acl.h>

#include <map>
#include <string>
#include <vector>

struct aclTensorDesc {
  aclDataType type;
  aclFormat format;
  std::vector<int64_t> dims;
  bool on_host = false;  // a scalar operand in host memory
};
struct aclDataBuffer {
  void* data;
  size_t size;
};
struct aclopAttr {
  std::map<std::string, double> values;
  double real(const std::string& name, double otherwise) const {
    auto entry = values.find(name);
    return entry == values.end() ? otherwise : entry->second;
  }
  bool flag(const std::string& name) const { return real(name, 0) != 0; }
};

namespace halsim {
struct AclopArguments {
  std::vector<const aclTensorDesc*> inputs, outputs;
  std::vector<const aclDataBuffer*> input_data, output_data;
  const aclopAttr* attr;
};
constexpr int kNotServed = -1;
using AclopServer = int (*)(const char* name, const AclopArguments& arguments, aclrtStream stream);
void serve_aclop(AclopServer server);  // called by libopapi when it is loaded
}  // namespace halsim
