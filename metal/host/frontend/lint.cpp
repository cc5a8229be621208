// What clang accepts and Metal does not, and the project's own rules.
// Every report ends in its rule's name in brackets.
#include <set>

#include "clang/AST/RecursiveASTVisitor.h"
#include "clang/Basic/SourceManager.h"
#include "clang/Lex/Lexer.h"
#include "frontend.h"
#include "llvm/ADT/StringExtras.h"

using namespace clang;

namespace msl {
namespace {

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

  bool VisitCompoundAssignOperator(CompoundAssignOperator* e) {
    QualType to = e->getLHS()->getType(), from = e->getComputationResultType();
    if (state.strict && !from.isNull() && to->isBFloat16Type() && from->isRealFloatingType() &&
        !from->isBFloat16Type())
      report(e->getOperatorLoc(), "no implicit conversion from '" + name(from) + "' to 'bfloat'",
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
    QualType to = cast->getTypeAsWritten(),
             from = cast->getSubExpr()->IgnoreParenImpCasts()->getType();
    spaceSpelt(cast->getTypeInfoAsWritten());
    if (to->isDependentType() || from->isDependentType())
      return true;
    if (to->isReferenceType() && from.getAddressSpace() != to->getPointeeType().getAddressSpace())
      report(cast->getExprLoc(), "a cast from one address space to another", "address-space");
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
    auto kind = loc.getTypePtr()->getKind();
    bool wide = kind == BuiltinType::LongDouble && spelling == "long";
    if (spelling == "double" || wide)
      report(loc.getBeginLoc(), "Metal has no double", "no-double");
    if ((kind == BuiltinType::LongLong || kind == BuiltinType::ULongLong) &&
        (spelling == "long" || spelling == "unsigned"))
      report(loc.getBeginLoc(), "Metal has no long long", "no-long-long");
    if (spelling == "__int128" || (kind == BuiltinType::UInt128 && spelling == "unsigned"))
      report(loc.getBeginLoc(), "Metal has no 128-bit integer", "no-int128");
    return true;
  }
  bool VisitFloatingLiteral(FloatingLiteral* literal) {
    if (literal->getType()->isSpecificBuiltinType(BuiltinType::LongDouble))
      report(literal->getBeginLoc(), "Metal has no double", "no-double");
    return true;
  }
  bool VisitComplexTypeLoc(ComplexTypeLoc loc) {
    return no(loc.getBeginLoc(), "complex numbers", "no-complex");
  }
  bool VisitBitIntTypeLoc(BitIntTypeLoc loc) {
    return no(loc.getBeginLoc(), "_BitInt", "no-bitint");
  }
  bool VisitTemplateSpecializationTypeLoc(TemplateSpecializationTypeLoc loc) {
    // MLX has vectors of 8.
    auto* vector = loc.getType()->getAs<VectorType>();
    unsigned count = vector ? vector->getNumElements() : 2;
    if (count > 4 && count != 8 && count != 16)
      report(loc.getBeginLoc(), "a vector has 2, 3, 4, 8 or 16 elements", "vector-size");
    return true;
  }
  bool VisitVariableArrayTypeLoc(VariableArrayTypeLoc loc) {
    report(loc.getBeginLoc(), "an array's length must be a constant", "no-vla");
    return true;
  }

  bool VisitFieldDecl(FieldDecl* field) {
    spaceSpelt(field->getTypeSourceInfo());
    return true;
  }
  bool VisitTypedefNameDecl(TypedefNameDecl* type) {
    spaceSpelt(type->getTypeSourceInfo());
    return true;
  }

  bool VisitVarDecl(VarDecl* variable) {
    spaceSpelt(variable->getTypeSourceInfo(), isa<ParmVarDecl>(variable));
    if (findAttribute(variable, "static_local"))
      report(variable->getLocation(), "a variable of a function cannot be static", "no-static");
    QualType type = variable->getType();
    if (type->isDependentType() || isa<ParmVarDecl>(variable))
      return true;
    LangAS space = type.getNonReferenceType().getAddressSpace();
    if (variable->isFileVarDecl() && space != LangAS::opencl_constant &&
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
      if (current_ && !isKernel(current_))
        report(variable->getLocation(), "a threadgroup variable outside a kernel function",
               "threadgroup-scope");
      if (current_)
        threadgroupBytes[current_] += context_.getTypeSizeInChars(type).getQuantity();
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
    if (isKernel(callee))
      report(call->getExprLoc(), "a call of a kernel", "kernel-call");
    // A macro of <metal_stdlib> may call what the source may not.
    bool own = sema_.SourceMgr.isInSystemMacro(call->getBeginLoc());
    if (!own && !isMetalFunction(callee))
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
    QualType left = e->getLHS()->IgnoreParenImpCasts()->getType();
    QualType right = e->getRHS()->IgnoreParenImpCasts()->getType();
    if (state.strict && ((left->isHalfType() && right->isBFloat16Type()) ||
                         (left->isBFloat16Type() && right->isHalfType())))
      report(e->getOperatorLoc(), "'half' and 'bfloat' have no common type", "bfloat-conversion");
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
    if (auto loc = function->getFunctionTypeLoc())
      spaceSpelt(loc.getReturnLoc());
    if (!function->isThisDeclarationADefinition() || function->isDependentContext())
      return true;
    if (function->isVariadic())
      no(function->getLocation(), "variadic functions", "no-variadic");
    if (isKernel(function)) {
      kernels.push_back(function);
      checkSignature(function, hostName(function),
                     [this](SourceLocation loc, const std::string& message, const char* rule) {
                       report(loc, message, rule);
                     });
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
    std::map<std::string, const FunctionDecl*> names;
    for (auto* kernel : kernels) {
      auto [found, fresh] = names.try_emplace(shownName(kernel), kernel->getCanonicalDecl());
      if (!fresh && found->second != kernel->getCanonicalDecl())
        report(kernel->getPointOfInstantiation().isValid() ? kernel->getPointOfInstantiation()
                                                           : kernel->getLocation(),
               "two kernels named '" + found->first + "'", "kernel-name");
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

  // The kernels, each once, with the function constants that they may read.
  std::vector<Kernel> described() {
    std::vector<Kernel> result;
    std::set<std::string> seen;
    for (auto* function : kernels) {
      std::string name = functionName(function);
      if (!seen.insert(name).second)
        continue;
      const auto* canonical = function->getCanonicalDecl();
      std::set<const FunctionDecl*> reached;
      collect(canonical, reached, true);
      std::set<int> ids;
      for (const auto* callee : reached)
        for (const auto* constant : constants[callee])
          ids.insert(integerArgument(findAttribute(constant, "function_constant")));
      result.push_back({function, name, hostName(function), threadgroupBytes[canonical], ids});
    }
    return result;
  }

 private:
  std::string functionName(const FunctionDecl* function) {
    std::string name;
    llvm::raw_string_ostream stream(name);
    function->getNameForDiagnostic(stream, manifestNames(context_), true);
    return name;
  }

  static bool isKernel(const FunctionDecl* function) {
    return findAttribute(function, "kernel") || findAttribute(function, "msl_kernel");
  }

  std::string shownName(const FunctionDecl* kernel) {
    std::string name = hostName(kernel);
    return name.empty() ? functionName(kernel) : name;
  }

  void spaceSpelt(const TypeSourceInfo* info, bool parameter = false) {
    if (info)
      spaceSpelt(info->getTypeLoc(), parameter);
  }

  // A pointer's or reference's address space must be written out, `thread` included. That one is no
  // type here, so the source text is looked at.
  void spaceSpelt(TypeLoc written, bool parameter = false) {
    if (written.getType()->getContainedDeducedType())
      return;
    TypeLoc loc = written.getUnqualifiedLoc();
    SourceLocation end;
    QualType target;
    if (auto pointer = loc.getAs<PointerTypeLoc>()) {
      end = pointer.getStarLoc();
      target = pointer.getPointeeLoc().getType();
    } else if (auto reference = loc.getAs<ReferenceTypeLoc>()) {
      end = reference.getSigilLoc();
      target = reference.getPointeeLoc().getType();
    } else if (auto array = loc.getAs<ArrayTypeLoc>(); array && parameter) {
      end = array.getLBracketLoc();
      target = array.getElementLoc().getType();
    } else {
      return;
    }
    SourceLocation begin = written.getBeginLoc();
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

  Sema& sema_;
  ASTContext& context_;
  unsigned diagnostic_;
  const FunctionDecl* current_ = nullptr;
  std::set<std::pair<unsigned, std::string>> seen_;
};

}  // namespace

void checkAndDescribe(Sema& sema) {
  Lint lint(sema);
  lint.TraverseDecl(sema.Context.getTranslationUnitDecl());
  lint.finish();
  writeManifest(sema, lint.described());
}

}  // namespace msl
