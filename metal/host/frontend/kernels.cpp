// Rules of a kernel's signature, and the manifest of kernels.
#include "clang/Basic/SourceManager.h"
#include "frontend.h"
#include "llvm/Support/FileSystem.h"
#include "llvm/Support/FormatVariadic.h"
#include "llvm/Support/JSON.h"

using namespace clang;

namespace msl {
namespace {

// Attributes of kernel parameters that the host fills in, and whether they are vectors.
const std::map<std::string, bool> kBuiltins = {
    {"thread_position_in_grid", true},
    {"thread_position_in_threadgroup", true},
    {"threadgroup_position_in_grid", true},
    {"threads_per_threadgroup", true},
    {"threads_per_grid", true},
    {"threadgroups_per_grid", true},
    {"dispatch_threads_per_threadgroup", true},
    {"thread_index_in_threadgroup", false},
    {"thread_index_in_simdgroup", false},
    {"thread_index_in_quadgroup", false},
    {"simdgroup_index_in_threadgroup", false},
    {"quadgroup_index_in_threadgroup", false},
    {"threads_per_simdgroup", false},
    {"thread_execution_width", false},
    {"simdgroups_per_threadgroup", false},
    {"dispatch_simdgroups_per_threadgroup", false},
};

std::string builtinOf(const ParmVarDecl* parameter) {
  for (const auto* attribute : parameter->specific_attrs<AnnotateAttr>()) {
    StringRef text = attribute->getAnnotation();
    if (text.consume_front("msl.") && kBuiltins.count(text.str()))
      return text.str();
  }
  return "";
}

bool isIndirect(QualType type) {
  return type->isPointerType() || type->isReferenceType();
}

using llvm::json::Array;
using llvm::json::Object;

Object describe(const ParmVarDecl* parameter, ASTContext& context, const PrintingPolicy& policy) {
  QualType type = parameter->getType().getCanonicalType();
  bool indirect = isIndirect(type);
  QualType value = indirect ? type->getPointeeType() : type;
  LangAS space = indirect ? value.getAddressSpace() : LangAS::Default;
  Object result{
      {"name", parameter->getName().str()},
      {"builtin", builtinOf(parameter)},
      {"space", space == LangAS::opencl_global     ? "device"
                : space == LangAS::opencl_constant ? "constant"
                : space == LangAS::opencl_local    ? "threadgroup"
                                                   : ""},
      {"reference", type->isReferenceType()},
      {"const", value.isConstQualified()},
      {"type", context.removeAddrSpaceQualType(value).getUnqualifiedType().getAsString(policy)},
      {"size", value->isIncompleteType()
                   ? 0
                   : static_cast<int64_t>(context.getTypeSizeInChars(value).getQuantity())}};
  if (const auto* attribute = findAttribute(parameter, "buffer"))
    result["index"] = integerArgument(attribute);
  if (const auto* attribute = findAttribute(parameter, "threadgroup"))
    result["index"] = integerArgument(attribute);
  if (const auto* attribute = findAttribute(parameter, "function_constant"))
    result["condition"] = argument(attribute);
  return result;
}

}  // namespace

void checkSignature(FunctionDecl* function, const std::string& hostName, Report report) {
  if (!function->getReturnType()->isVoidType())
    report(function->getLocation(), "a kernel returns void", "kernel-signature");
  if (state.strict && function->isTemplateInstantiation() && hostName.empty())
    report(function->getPointOfInstantiation(),
           "an instantiated kernel needs [[host_name(\"...\")]]", "host-name");
  if (const auto* limit = findAttribute(function, "max_total_threads_per_threadgroup"))
    if (integerArgument(limit) < 1)
      report(function->getLocation(), "a limit on threads must be a constant above 0",
             "kernel-signature");
  std::set<int> buffers;
  int arguments = 0, components = 0;
  for (auto* parameter : function->parameters()) {
    QualType type = parameter->getType();
    SourceLocation loc = parameter->getLocation();
    if (const auto* attribute = findAttribute(parameter, "buffer")) {
      int index = integerArgument(attribute);
      if (index < 0 || index > 30)
        report(loc, "a buffer index must be 0 to 30", "kernel-signature");
      else if (!buffers.insert(index).second)
        report(loc, "buffer index used twice", "kernel-signature");
    }
    if (isIndirect(type)) {
      if (type->getPointeeType().getAddressSpace() != LangAS::opencl_local && ++arguments == 32)
        report(loc, "a kernel takes 31 buffers at most", "kernel-signature");
      if (type->getPointeeType().getAddressSpace() == LangAS::Default)
        report(loc, "a kernel's pointer or reference needs device, constant or threadgroup",
               "kernel-signature");
      if (type->getPointeeType()->isPointerType())
        report(loc, "a kernel takes no pointer to a pointer", "kernel-signature");
      continue;
    }
    std::string builtin = builtinOf(parameter);
    if (builtin.empty()) {
      report(loc, "a kernel parameter needs an address space or an attribute", "kernel-signature");
      continue;
    }
    auto* vector = type->getAs<VectorType>();
    int count = vector ? vector->getNumElements() : 1;
    if (vector && !kBuiltins.at(builtin))
      report(loc, "[[" + builtin + "]] is a scalar", "kernel-signature");
    else if (kBuiltins.at(builtin) && components && components != count)
      report(loc, "a kernel's positions and sizes in the grid have one number of components",
             "kernel-signature");
    else if (kBuiltins.at(builtin))
      components = count;
    QualType element = vector ? vector->getElementType() : type;
    if (!element->isSpecificBuiltinType(BuiltinType::UInt) &&
        !element->isSpecificBuiltinType(BuiltinType::UShort))
      report(loc, "[[" + builtin + "]] must be ushort or uint", "kernel-signature");
  }
}

PrintingPolicy manifestNames(const ASTContext& context) {
  PrintingPolicy policy(context.getLangOpts());
  policy.SuppressTagKeyword = policy.FullyQualifiedName = policy.PrintCanonicalTypes = true;
  policy.Bool = true;
  return policy;
}

void writeManifest(Sema& sema, const std::vector<Kernel>& found) {
  ASTContext& context = sema.Context;
  PrintingPolicy policy = manifestNames(context);
  Array kernels, constants;
  for (const auto& [function, name, hostName, threadgroupBytes, ids] : found) {
    Array parameters;
    for (auto* parameter : function->parameters())
      parameters.push_back(describe(parameter, context, policy));
    auto place = sema.SourceMgr.getPresumedLoc(function->getLocation());
    Object kernel{{"function", name},
                  {"name", hostName},
                  {"file", place.getFilename()},
                  {"line", place.getLine()},
                  {"threadgroup_bytes", static_cast<int64_t>(threadgroupBytes)},
                  {"parameters", std::move(parameters)},
                  {"constants", Array(ids)}};
    if (const auto* limit = findAttribute(function, "max_total_threads_per_threadgroup"))
      kernel["max_threads"] = integerArgument(limit);
    kernels.push_back(std::move(kernel));
  }
  for (auto* constant : state.constants)
    constants.push_back(
        Object{{"name", constant->getName().str()},
               {"id", integerArgument(findAttribute(constant, "function_constant"))},
               {"type", context.removeAddrSpaceQualType(constant->getType())
                            .getUnqualifiedType()
                            .getAsString(policy)}});
  std::error_code error;
  llvm::raw_fd_ostream out(state.manifest, error);
  if (error) {
    sema.Diag(SourceLocation(),
              sema.Diags.getCustomDiagID(DiagnosticsEngine::Error, "cannot write %0: %1"))
        << state.manifest << error.message();
    return;
  }
  out << llvm::formatv("{0:2}\n", llvm::json::Value(Object{{"kernels", std::move(kernels)},
                                                           {"constants", std::move(constants)}}));
}

}  // namespace msl
