// What clang accepts and Metal does not, the project's own rules, and the manifest of kernels.
// Every report ends in its rule's name in brackets.
#include <set>

#include "clang/AST/RecursiveASTVisitor.h"
#include "clang/Basic/SourceManager.h"
#include "clang/Lex/Lexer.h"
#include "frontend.h"
#include "llvm/ADT/StringExtras.h"
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

// Type of the elements of an array, vector, pointer or reference.
QualType elementOf(QualType type) {
  for (;;) {
    type = type.getNonReferenceType();
    if (auto* vector = type->getAs<VectorType>())
      type = vector->getElementType();
    else if (type->isPointerType())
      type = type->getPointeeType();
    else if (auto* array = type->getAsArrayTypeUnsafe())
      type = array->getElementType();
    else
      return type;
  }
}

class Lint : public RecursiveASTVisitor<Lint> {
 public:
  explicit Lint(Sema& sema)
      : sema_(sema),
        context_(sema.Context),
        diagnostic_(sema.Diags.getCustomDiagID(DiagnosticsEngine::Error, "%0 [%1]")) {}

  std::map<const FunctionDecl*, std::set<const FunctionDecl*>> calls;
  std::map<const FunctionDecl*, std::set<const VarDecl*>> constants;
  std::map<const FunctionDecl*, uint64_t> threadgroupBytes;
  std::vector<FunctionDecl*> kernels;

  bool shouldVisitTemplateInstantiations() const {
    return true;
  }

  bool TraverseFunctionDecl(FunctionDecl* function) {
    return traverse(function);
  }
  bool TraverseCXXMethodDecl(CXXMethodDecl* function) {
    return traverse(function);
  }
  bool TraverseCXXConstructorDecl(CXXConstructorDecl* function) {
    return traverse(function);
  }
  bool TraverseCXXConversionDecl(CXXConversionDecl* function) {
    return traverse(function);
  }

  // ---- types and conversions
  bool VisitImplicitCastExpr(ImplicitCastExpr* cast) {
    if (cast->isPartOfExplicitCast() || cast->getCastKind() != CK_FloatingCast)
      return true;
    QualType to = cast->getType().getUnqualifiedType();
    QualType from = cast->getSubExpr()->getType().getUnqualifiedType();
    if (to->isBFloat16Type() && !from->isBFloat16Type() &&
        (state.strict || !cast->getSubExpr()->isEvaluatable(context_)))
      report(cast->getBeginLoc(), "no implicit conversion from '" + name(from) + "' to 'bfloat'",
             "bfloat-conversion");
    return true;
  }

  bool VisitCastExpr(CastExpr* cast) {
    if (cast->getCastKind() != CK_BitCast)
      return true;
    auto* to = cast->getType()->getAs<VectorType>();
    auto* from = cast->getSubExpr()->getType()->getAs<VectorType>();
    if (to && from && !context_.hasSameType(to->getElementType(), from->getElementType()))
      report(cast->getExprLoc(),
             "a vector cast converts in Metal; write T(x) to convert, as_type<T>(x) to reinterpret",
             "vector-cast");
    return true;
  }

  bool VisitExplicitCastExpr(ExplicitCastExpr* cast) {
    QualType to = cast->getType(), from = cast->getSubExpr()->IgnoreParenImpCasts()->getType();
    if (to->isDependentType() || from->isDependentType())
      return true;
    if (!to->isPointerType() || !(from->isPointerType() || from->isArrayType()))
      return true;
    LangAS source =
        from->isPointerType() ? from->getPointeeType().getAddressSpace() : from.getAddressSpace();
    if (source != to->getPointeeType().getAddressSpace())
      report(cast->getExprLoc(), "a cast from one address space to another", "address-space");
    return true;
  }

  // Spelt types only: overload resolution tries every builtin type in templates.
  bool VisitBuiltinTypeLoc(BuiltinTypeLoc loc) {
    StringRef spelling = Lexer::getSourceText(
        CharSourceRange::getTokenRange(sema_.SourceMgr.getSpellingLoc(loc.getBeginLoc())),
        sema_.SourceMgr, sema_.getLangOpts());
    if (spelling == "double")
      report(loc.getBeginLoc(), "Metal has no double", "no-double");
    auto kind = loc.getTypePtr()->getKind();
    if ((kind == BuiltinType::LongLong || kind == BuiltinType::ULongLong) &&
        (spelling == "long" || spelling == "unsigned"))
      report(loc.getBeginLoc(), "Metal has no long long", "no-long-long");
    if (spelling == "__int128")
      report(loc.getBeginLoc(), "Metal has no 128-bit integer", "no-int128");
    return true;
  }
  bool VisitVariableArrayTypeLoc(VariableArrayTypeLoc loc) {
    report(loc.getBeginLoc(), "an array's length must be a constant", "no-vla");
    return true;
  }

  bool VisitFieldDecl(FieldDecl* field) {
    spacesSpelt(field);
    return true;
  }

  bool VisitVarDecl(VarDecl* variable) {
    spacesSpelt(variable);
    if (findAttribute(variable, "static_local"))
      report(variable->getLocation(), "a variable of a function cannot be static", "no-static");
    QualType type = variable->getType();
    if (type->isDependentType() || isa<ParmVarDecl>(variable))
      return true;
    LangAS space = type.getNonReferenceType().getAddressSpace();
    if (variable->isFileVarDecl() && !variable->isConstexpr() && space != LangAS::opencl_constant &&
        type.getAddressSpace() != LangAS::opencl_constant)
      report(variable->getLocation(), "a program-scope variable must be 'constant'",
             "constant-scope");
    if (variable->isStaticLocal() && space != LangAS::opencl_local &&
        space != LangAS::opencl_constant)
      report(variable->getLocation(), "a static variable must be 'constant'", "constant-scope");
    if (type.getAddressSpace() == LangAS::opencl_global)
      report(variable->getLocation(), "a variable cannot live in device memory", "address-space");
    if (elementOf(type)->isSpecificBuiltinType(BuiltinType::Double))
      report(variable->getLocation(), "Metal has no double", "no-double");
    if (type.getAddressSpace() == LangAS::opencl_local && variable->isLocalVarDecl()) {
      if (current_ && !findAttribute(current_, "kernel") && !findAttribute(current_, "msl_kernel"))
        report(variable->getLocation(), "a threadgroup variable outside a kernel function",
               "threadgroup-scope");
      if (current_)
        threadgroupBytes[current_] += context_.getTypeSizeInChars(type).getQuantity();
      if (variable->getInit() && variable->getInitStyle() == VarDecl::CInit &&
          !isa<CXXConstructExpr>(variable->getInit()))
        report(variable->getLocation(), "a threadgroup variable takes no initialiser",
               "threadgroup-initialiser");
    }
    return true;
  }

  // ---- calls
  bool VisitDeclRefExpr(DeclRefExpr* reference) {
    if (auto* variable = dyn_cast<VarDecl>(reference->getDecl());
        variable && !isa<ParmVarDecl>(variable) && current_ &&
        findAttribute(variable, "function_constant"))
      constants[current_].insert(variable->getCanonicalDecl());
    return true;
  }

  bool VisitCXXConstructExpr(CXXConstructExpr* construct) {
    if (current_)
      calls[current_].insert(construct->getConstructor()->getCanonicalDecl());
    return true;
  }

  bool VisitCXXMemberCallExpr(CXXMemberCallExpr* call) {
    auto* method = call->getMethodDecl();
    if (!method || method->isImplicit() || method->isStatic())
      return true;
    QualType object = call->getImplicitObjectArgument()->IgnoreParenImpCasts()->getType();
    if (object->isPointerType())
      object = object->getPointeeType();
    if (object.getAddressSpace() != method->getMethodQualifiers().getAddressSpace())
      report(call->getExprLoc(),
             "'" + method->getNameAsString() + "' is for objects in another address space",
             "address-space");
    return true;
  }

  bool VisitCallExpr(CallExpr* call) {
    if (call->isTypeDependent() || call->getCallee()->isTypeDependent())
      return true;
    auto* callee = call->getDirectCallee();
    if (!callee) {
      if (!isa<CXXMemberCallExpr>(call) && !isa<UnresolvedLookupExpr>(call->getCallee()))
        report(call->getExprLoc(), "a call through a pointer", "no-function-pointer");
      return true;
    }
    if (current_)
      calls[current_].insert(callee->getCanonicalDecl());
    if (!isMetalFunction(callee))
      report(call->getExprLoc(), "'" + callee->getNameAsString() + "' is not a Metal function",
             "function-whitelist");
    return true;
  }

  // ---- statements and declarations that Metal lacks
  bool VisitCXXNewExpr(CXXNewExpr* e) {
    return no(e->getBeginLoc(), "new", "no-new");
  }
  bool VisitCXXDeleteExpr(CXXDeleteExpr* e) {
    return no(e->getBeginLoc(), "delete", "no-new");
  }
  bool VisitCXXThrowExpr(CXXThrowExpr* e) {
    return no(e->getBeginLoc(), "throw", "no-exceptions");
  }
  bool VisitCXXTryStmt(CXXTryStmt* s) {
    return no(s->getBeginLoc(), "try", "no-exceptions");
  }
  bool VisitGotoStmt(GotoStmt* s) {
    return no(s->getBeginLoc(), "goto", "no-goto");
  }
  bool VisitLabelStmt(LabelStmt* s) {
    return no(s->getBeginLoc(), "labels", "no-goto");
  }
  bool VisitAsmStmt(AsmStmt* s) {
    return no(s->getAsmLoc(), "inline assembly", "no-asm");
  }
  bool VisitCXXTypeidExpr(CXXTypeidExpr* e) {
    return no(e->getBeginLoc(), "typeid", "no-rtti");
  }
  bool VisitCXXDynamicCastExpr(CXXDynamicCastExpr* e) {
    return no(e->getBeginLoc(), "dynamic_cast", "no-rtti");
  }
  bool VisitStmtExpr(StmtExpr* e) {
    return no(e->getBeginLoc(), "statement expressions", "gnu-extension");
  }
  bool VisitLambdaExpr(LambdaExpr* e) {
    return state.version >= 320 || no(e->getBeginLoc(), "lambdas before 3.2", "no-lambda");
  }
  bool VisitConceptDecl(ConceptDecl* d) {
    return no(d->getLocation(), "concepts", "cxx20");
  }
  bool VisitRequiresExpr(RequiresExpr* e) {
    return no(e->getBeginLoc(), "requires", "cxx20");
  }
  bool VisitCXXRewrittenBinaryOperator(CXXRewrittenBinaryOperator* e) {
    return no(e->getBeginLoc(), "rewritten comparisons", "cxx20");
  }
  bool VisitBinaryOperator(BinaryOperator* e) {
    return e->getOpcode() != BO_Cmp || no(e->getBeginLoc(), "operator <=>", "cxx20");
  }
  bool VisitDesignatedInitExpr(DesignatedInitExpr* e) {
    return no(e->getBeginLoc(), "designated initialisers", "cxx20");
  }
  bool VisitCoroutineBodyStmt(CoroutineBodyStmt* s) {
    return no(s->getBeginLoc(), "coroutines", "cxx20");
  }
  bool VisitCXXMethodDecl(CXXMethodDecl* method) {
    return !method->isVirtual() || no(method->getLocation(), "virtual functions", "no-virtual");
  }

  bool VisitFunctionDecl(FunctionDecl* function) {
    if (!function->isThisDeclarationADefinition() || function->isDependentContext())
      return true;
    if (function->isVariadic())
      no(function->getLocation(), "variadic functions", "no-variadic");
    if (findAttribute(function, "kernel") || findAttribute(function, "msl_kernel")) {
      kernels.push_back(function);
      kernelSignature(function);
    }
    return true;
  }

  void finish() {
    for (const auto& [function, unused] : calls) {
      std::set<const FunctionDecl*> seen;
      collect(function, seen, false);
      if (seen.count(function))
        report(function->getLocation(), "recursion", "no-recursion");
    }
  }

  // Everything that a function may call; itself only where it is reached again, or when asked for.
  void collect(const FunctionDecl* function, std::set<const FunctionDecl*>& seen, bool self) {
    if (self)
      seen.insert(function);
    auto found = calls.find(function);
    if (found == calls.end())
      return;
    for (const auto* callee : found->second)
      if (seen.insert(callee).second)
        collect(callee, seen, false);
  }

  std::string hostName(const FunctionDecl* function) {
    for (const auto* redeclaration : function->redecls())
      if (const auto* attribute = findAttribute(redeclaration, "host_name"))
        return argument(attribute);
    return "";
  }

 private:
  // A pointer's or reference's address space must be written out, `thread` included. That one is no
  // type here, so the source text is looked at.
  void spacesSpelt(DeclaratorDecl* decl) {
    auto* info = decl->getTypeSourceInfo();
    if (!info || info->getType()->getContainedDeducedType())
      return;
    TypeLoc loc = info->getTypeLoc().getUnqualifiedLoc();
    SourceLocation end;
    QualType target;
    if (auto pointer = loc.getAs<PointerTypeLoc>()) {
      end = pointer.getStarLoc();
      target = pointer.getPointeeLoc().getType();
    } else if (auto reference = loc.getAs<ReferenceTypeLoc>()) {
      end = reference.getSigilLoc();
      target = reference.getPointeeLoc().getType();
    } else if (auto array = loc.getAs<ArrayTypeLoc>(); array && isa<ParmVarDecl>(decl)) {
      end = array.getLBracketLoc();
      target = array.getElementLoc().getType();
    } else {
      return;
    }
    SourceLocation begin = decl->getOuterLocStart();
    if (target.getAddressSpace() != LangAS::Default || target->isFunctionType())
      return;
    if (begin.isInvalid() || end.isInvalid() || begin.isMacroID() || end.isMacroID())
      return;
    // `thread` is an empty macro, so a declaration that begins with it begins behind it.
    auto [file, last] = sema_.SourceMgr.getDecomposedLoc(end);
    auto [other, first] = sema_.SourceMgr.getDecomposedLoc(begin);
    if (file != other || first > last)
      return;
    StringRef buffer = sema_.SourceMgr.getBufferData(file);
    size_t before = buffer.take_front(first).find_last_of("(,{;}<>)");
    StringRef text = buffer.slice(before == StringRef::npos ? 0 : before + 1, last);
    SmallVector<StringRef, 8> words;
    SplitString(text, words, " \t\n<>(),*&");
    for (StringRef word : words)
      if (word == "thread" || word == "device" || word == "threadgroup" || word == "constant")
        return;
    report(end,
           "a pointer or reference needs its address space: thread, device, constant or "
           "threadgroup",
           "address-space-spelt");
  }

  template <class Function>
  bool traverse(Function* function) {
    auto* outer = current_;
    current_ = function->getCanonicalDecl();
    bool result;
    if constexpr (std::is_same_v<Function, CXXMethodDecl>)
      result = RecursiveASTVisitor::TraverseCXXMethodDecl(function);
    else if constexpr (std::is_same_v<Function, CXXConstructorDecl>)
      result = RecursiveASTVisitor::TraverseCXXConstructorDecl(function);
    else if constexpr (std::is_same_v<Function, CXXConversionDecl>)
      result = RecursiveASTVisitor::TraverseCXXConversionDecl(function);
    else
      result = RecursiveASTVisitor::TraverseFunctionDecl(function);
    current_ = outer;
    return result;
  }

  bool foreign(SourceLocation loc) {
    return loc.isInvalid() || sema_.SourceMgr.isInSystemHeader(loc);
  }

  // A call is Metal's when the source itself defines the function, or <metal_stdlib> offers it
  // under a public name. Names that begin with __ and C functions are the host's own.
  bool isMetalFunction(const FunctionDecl* callee) {
    if (callee->isImplicit() && !callee->getBuiltinID())
      return true;
    const auto* id = callee->getIdentifier();
    StringRef name = id ? id->getName() : "";
    if (callee->getBuiltinID() &&
        (callee->getLocation().isInvalid() ||
         sema_.SourceMgr.isInSystemHeader(callee->getLocation()) || name.starts_with("__builtin")))
      return false;
    if (!foreign(callee->getLocation()))
      return true;
    if (name.starts_with("__metal_"))
      return !state.strict;
    if (name == "__msl_make")
      return true;
    return !name.starts_with("__") && !callee->isExternC();
  }

  bool no(SourceLocation loc, const char* what, const char* rule) {
    report(loc, std::string("Metal has no ") + what, rule);
    return true;
  }

  void report(SourceLocation loc, const std::string& message, const char* rule) {
    loc = sema_.SourceMgr.getExpansionLoc(loc);
    if (foreign(loc) || !seen_.insert({loc.getRawEncoding(), message}).second)
      return;
    sema_.Diag(loc, diagnostic_) << message << rule;
  }

  std::string name(QualType type) {
    if (type->isBFloat16Type())
      return "bfloat";
    if (type->isHalfType())
      return "half";
    return type.getAsString(context_.getPrintingPolicy());
  }

  void kernelSignature(FunctionDecl* function) {
    if (!function->getReturnType()->isVoidType())
      report(function->getLocation(), "a kernel returns void", "kernel-signature");
    if (state.strict && function->isTemplateInstantiation() && hostName(function).empty())
      report(function->getPointOfInstantiation(),
             "an instantiated kernel needs [[host_name(\"...\")]]", "host-name");
    std::set<int> buffers;
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
        if (type->getPointeeType().getAddressSpace() == LangAS::Default)
          report(loc, "a kernel's pointer or reference needs device, constant or threadgroup",
                 "kernel-signature");
        if (type->getPointeeType()->isPointerType())
          report(loc, "a kernel takes no pointer to a pointer", "kernel-signature");
        continue;
      }
      std::string builtin = builtinOf(parameter);
      if (builtin.empty()) {
        report(loc, "a kernel parameter needs an address space or an attribute",
               "kernel-signature");
        continue;
      }
      auto* vector = type->getAs<VectorType>();
      if (vector && !kBuiltins.at(builtin))
        report(loc, "[[" + builtin + "]] is a scalar", "kernel-signature");
      QualType element = vector ? vector->getElementType() : type;
      if (!element->isSpecificBuiltinType(BuiltinType::UInt) &&
          !element->isSpecificBuiltinType(BuiltinType::UShort))
        report(loc, "[[" + builtin + "]] must be ushort or uint", "kernel-signature");
    }
  }

  Sema& sema_;
  ASTContext& context_;
  unsigned diagnostic_;
  const FunctionDecl* current_ = nullptr;
  std::set<std::pair<unsigned, std::string>> seen_;
};

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

void writeManifest(Sema& sema, Lint& lint) {
  ASTContext& context = sema.Context;
  PrintingPolicy policy(context.getLangOpts());
  policy.SuppressTagKeyword = policy.FullyQualifiedName = policy.PrintCanonicalTypes = true;
  policy.Bool = true;
  Array kernels, constants;
  std::set<std::string> seen;
  for (auto* function : lint.kernels) {
    std::string name;
    llvm::raw_string_ostream stream(name);
    function->getNameForDiagnostic(stream, policy, true);
    if (!seen.insert(name).second)
      continue;
    Array parameters;
    for (auto* parameter : function->parameters())
      parameters.push_back(describe(parameter, context, policy));
    std::set<const FunctionDecl*> reached;
    const auto* canonical = function->getCanonicalDecl();
    lint.collect(canonical, reached, true);
    std::set<int> ids;
    for (const auto* callee : reached)
      for (const auto* constant : lint.constants[callee])
        ids.insert(integerArgument(findAttribute(constant, "function_constant")));
    auto place = sema.SourceMgr.getPresumedLoc(function->getLocation());
    Object kernel{{"function", name},
                  {"name", lint.hostName(function)},
                  {"file", place.getFilename()},
                  {"line", place.getLine()},
                  {"threadgroup_bytes", static_cast<int64_t>(lint.threadgroupBytes[canonical])},
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

}  // namespace

void checkAndDescribe(Sema& sema) {
  Lint lint(sema);
  lint.TraverseDecl(sema.Context.getTranslationUnitDecl());
  lint.finish();
  writeManifest(sema, lint);
}

}  // namespace msl
