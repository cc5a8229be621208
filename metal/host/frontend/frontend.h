// What the parts of the front end share.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "clang/AST/ASTContext.h"
#include "clang/AST/Attr.h"
#include "clang/AST/Decl.h"
#include "clang/Sema/Sema.h"

namespace msl {

// Everything that the driver tells the plugin, and what the plugin remembers for one source file.
struct State {
  std::string manifest;                    // path of the JSON manifest; empty while generating code
  int version = 310;                       // of the language, as __METAL_VERSION__
  bool strict = false;                     // also the project's own rules
  bool gpu = false;                        // target is NVPTX
  std::map<int, std::string> values;       // function constant id -> value
  std::vector<clang::VarDecl*> constants;  // function constants in source order
};
extern State state;

// MSL attributes are kept as annotations "msl.NAME:ARGUMENT".
const clang::AnnotateAttr* findAttribute(const clang::Decl* decl, llvm::StringRef name);
std::string argument(const clang::AnnotateAttr* attribute);
int integerArgument(const clang::AnnotateAttr* attribute);  // -1 when absent or not a number

// A kernel, and what its callees add to it.
struct Kernel {
  clang::FunctionDecl* function;
  std::string name, hostName;
  uint64_t threadgroupBytes;
  std::set<int> constants;  // ids of the function constants that it may read
};
using Report = llvm::function_ref<void(clang::SourceLocation, const std::string&, const char*)>;
void checkSignature(clang::FunctionDecl* kernel, const std::string& hostName, Report report);
clang::PrintingPolicy manifestNames(const clang::ASTContext& context);
void writeManifest(clang::Sema& sema, const std::vector<Kernel>& kernels);

// Rewrites tokens as the parser reads them.
std::function<void(const clang::Token&)> tokenWatcher(clang::Preprocessor& preprocessor,
                                                      clang::LangOptions& options);

// Reports what Metal rejects and clang accepts, then writes the manifest.
void checkAndDescribe(clang::Sema& sema);

}  // namespace msl
