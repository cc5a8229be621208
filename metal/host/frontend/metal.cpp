// clang-19 plugin that turns its C++ front end into one for the Metal Shading Language:
// OpenCL's address spaces as types, MSL attributes, function constants, threadgroup variables,
// copies of structs between address spaces.
#include <cstdlib>

#include "clang/AST/ASTConsumer.h"
#include "clang/AST/DeclCXX.h"
#include "clang/AST/RecursiveASTVisitor.h"
#include "clang/Basic/TargetInfo.h"
#include "clang/Frontend/CompilerInstance.h"
#include "clang/Frontend/FrontendPluginRegistry.h"
#include "clang/Lex/Preprocessor.h"
#include "clang/Sema/ParsedAttr.h"
#include "clang/Sema/SemaConsumer.h"
#include "frontend.h"

using namespace clang;

namespace msl {

State state;

const AnnotateAttr* findAttribute(const Decl* decl, StringRef name) {
  for (const auto* attribute : decl->specific_attrs<AnnotateAttr>()) {
    StringRef text = attribute->getAnnotation();
    if (text.consume_front("msl.") && text.split(':').first == name)
      return attribute;
  }
  return nullptr;
}

std::string argument(const AnnotateAttr* attribute) {
  return attribute ? attribute->getAnnotation().split(':').second.str() : "";
}

int integerArgument(const AnnotateAttr* attribute) {
  int value = -1;
  // What depended on a template's parameters, once they are known.
  if (attribute && attribute->args_size())
    if (auto* known = dyn_cast<ConstantExpr>(*attribute->args_begin()))
      return static_cast<int>(known->getResultAsAPSInt().getExtValue());
  if (StringRef(argument(attribute)).getAsInteger(10, value))
    return -1;
  return value;
}

namespace {

constexpr LangAS kSpaces[] = {LangAS::Default, LangAS::opencl_global, LangAS::opencl_constant,
                              LangAS::opencl_local};

// ---- Copies of trivial structs between address spaces.
// Metal lets a struct be copied from any space and stored to any writable one. C++ has one implicit
// copy constructor and assignment, for the default space; the others are added here.
class SpaceCopies {
 public:
  SpaceCopies(Sema& sema, CXXRecordDecl* record)
      : sema_(sema),
        context_(sema.Context),
        record_(record),
        loc_(record->getLocation()),
        type_(context_.getTypeDeclType(record)) {}

  void add() {
    if (record_->isDependentContext() || record_->isLambda() || record_->isInvalidDecl())
      return;
    if (record_->hasUserDeclaredCopyConstructor() || record_->hasUserDeclaredCopyAssignment()) {
      defaultInThreadgroup();
      return;
    }
    if (!record_->hasTrivialCopyConstructor() && !record_->needsImplicitCopyConstructor())
      return;
    // The five implicit members come first: a copy constructor declared later would suppress them.
    if (record_->needsImplicitDefaultConstructor())
      sema_.DeclareImplicitDefaultConstructor(record_);
    if (record_->needsImplicitCopyConstructor())
      sema_.DeclareImplicitCopyConstructor(record_);
    if (record_->needsImplicitMoveConstructor())
      sema_.DeclareImplicitMoveConstructor(record_);
    if (record_->needsImplicitCopyAssignment())
      sema_.DeclareImplicitCopyAssignment(record_);
    if (record_->needsImplicitMoveAssignment())
      sema_.DeclareImplicitMoveAssignment(record_);
    for (LangAS source : kSpaces)
      if (source != LangAS::Default)
        constructor(reference(source, true), LangAS::Default, ConstexprSpecKind::Constexpr);
    defaultInThreadgroup();
    for (auto* method : record_->methods())
      if (method->isCopyAssignmentOperator() || method->isMoveAssignmentOperator())
        preferForThread(method);
    for (LangAS target : {LangAS::Default, LangAS::opencl_global, LangAS::opencl_local})
      for (LangAS source : kSpaces)
        if (target != LangAS::Default || source != LangAS::Default)
          assignment(target, source);
  }

 private:
  // An array of trivial objects may live in threadgroup memory.
  void defaultInThreadgroup() {
    if (record_->hasTrivialDefaultConstructor())
      constructor(QualType(), LangAS::opencl_local, ConstexprSpecKind::Unspecified);
  }

  // clang lets a thread object call a device method; enable_if breaks that tie.
  void preferForThread(CXXMethodDecl* method) {
    method->addAttr(EnableIfAttr::CreateImplicit(
        context_, CXXBoolLiteralExpr::Create(context_, true, context_.BoolTy, loc_), ""));
  }

  QualType reference(LangAS space, bool constant) {
    QualType type = constant ? type_.withConst() : type_;
    if (space != LangAS::Default)
      type = context_.getAddrSpaceQualType(type, space);
    return context_.getLValueReferenceType(type);
  }

  FunctionProtoType::ExtProtoInfo prototype(LangAS space) {
    FunctionProtoType::ExtProtoInfo info;
    info.ExceptionSpec.Type = EST_BasicNoexcept;
    if (space != LangAS::Default)
      info.TypeQuals.addAddressSpace(space);
    return info;
  }

  void finish(CXXMethodDecl* method, QualType parameter) {
    if (!parameter.isNull()) {
      auto* decl =
          ParmVarDecl::Create(context_, method, loc_, loc_, nullptr, parameter,
                              context_.getTrivialTypeSourceInfo(parameter, loc_), SC_None, nullptr);
      method->setParams(decl);
    }
    method->setAccess(AS_public);
    method->setDefaulted();
    method->setImplicit();
    method->setTrivial(true);
    record_->addDecl(method);
  }

  void constructor(QualType parameter, LangAS space, ConstexprSpecKind constexprKind) {
    ArrayRef<QualType> parameters;
    if (!parameter.isNull())
      parameters = parameter;
    QualType type = context_.getFunctionType(context_.VoidTy, parameters, prototype(space));
    DeclarationName name =
        context_.DeclarationNames.getCXXConstructorName(context_.getCanonicalType(type_));
    finish(CXXConstructorDecl::Create(context_, record_, loc_, {name, loc_}, type,
                                      context_.getTrivialTypeSourceInfo(type, loc_),
                                      ExplicitSpecifier(), false, true, true, constexprKind),
           parameter);
  }

  void assignment(LangAS target, LangAS source) {
    QualType parameter = reference(source, true);
    QualType type =
        context_.getFunctionType(reference(target, false), parameter, prototype(target));
    DeclarationName name = context_.DeclarationNames.getCXXOperatorName(OO_Equal);
    auto* method = CXXMethodDecl::Create(context_, record_, loc_, {name, loc_}, type,
                                         context_.getTrivialTypeSourceInfo(type, loc_), SC_None,
                                         false, true, ConstexprSpecKind::Unspecified, loc_);
    if (target == LangAS::Default)
      preferForThread(method);
    finish(method, parameter);
  }

  Sema& sema_;
  ASTContext& context_;
  CXXRecordDecl* record_;
  SourceLocation loc_;
  QualType type_;
};

// ---- Before code generation: annotations have done their work, and threadgroup variables have no
// initialiser (no constructor may run on them).
struct Strip : RecursiveASTVisitor<Strip> {
  bool shouldVisitTemplateInstantiations() const {
    return true;
  }
  bool VisitFunctionDecl(FunctionDecl* function) {
    function->dropAttr<AnnotateAttr>();
    for (auto* parameter : function->parameters())
      parameter->dropAttr<AnnotateAttr>();
    return true;
  }
  bool VisitVarDecl(VarDecl* variable) {
    if (variable->isStaticLocal() && variable->getType().getAddressSpace() == LangAS::opencl_local)
      variable->setInit(nullptr);
    variable->dropAttr<AnnotateAttr>();
    return true;
  }
};

struct Consumer : SemaConsumer {
  Sema* sema = nullptr;

  void InitializeSema(Sema& s) override {
    sema = &s;
  }
  void ForgetSema() override {
    sema = nullptr;
  }

  void HandleTagDeclDefinition(TagDecl* decl) override {
    if (auto* record = dyn_cast<CXXRecordDecl>(decl); record && sema)
      SpaceCopies(*sema, record).add();
  }
  bool HandleTopLevelDecl(DeclGroupRef group) override {
    if (!state.manifest.empty())
      return true;
    for (auto* decl : group)
      if (isa<FunctionDecl>(decl))
        Strip().TraverseDecl(decl);
    return true;
  }
  void HandleTranslationUnit(ASTContext& context) override {
    if (state.manifest.empty())
      Strip().TraverseDecl(context.getTranslationUnitDecl());
    else if (sema && !context.getDiagnostics().hasErrorOccurred())
      checkAndDescribe(*sema);
  }
};

// The map from language to machine address spaces is a protected member.
struct TargetSpaces : TargetInfo {
  static const LangASMap*& of(TargetInfo& target) {
    return static_cast<TargetSpaces&>(target).AddrSpaceMap;
  }
};

struct Action : PluginASTAction {
  std::unique_ptr<ASTConsumer> CreateASTConsumer(CompilerInstance&, StringRef) override {
    return std::make_unique<Consumer>();
  }
  ActionType getActionType() override {
    return AddBeforeMainAction;
  }

  bool ParseArgs(const CompilerInstance& compiler, const std::vector<std::string>& args) override {
    for (StringRef arg : args) {
      if (arg.consume_front("manifest=")) {
        state.manifest = arg.str();
      } else if (arg.consume_front("constant=")) {
        auto [id, value] = arg.split(':');
        state.values[std::atoi(id.str().c_str())] = value.str();
      } else if (arg.consume_front("version=")) {
        state.version = std::atoi(arg.str().c_str());
      } else if (arg == "strict") {
        state.strict = true;
      } else {
        return false;
      }
    }
    auto& options = const_cast<LangOptions&>(compiler.getLangOpts());
    options.SinglePrecisionConstants = 1;
    options.Half = options.NativeHalfType = options.NativeHalfArgsAndReturns = 1;
    options.OpenCLVersion = 300;
    auto& preprocessor = compiler.getPreprocessor();
    auto& names = preprocessor.getIdentifierTable();
    names.get("__global", tok::kw___global);
    names.get("__local", tok::kw___local);
    names.get("__constant", tok::kw___constant);
    names.get("constant", tok::kw___constant);
    preprocessor.setTokenWatcher(tokenWatcher(preprocessor, options));
    state.gpu = compiler.getTarget().getTriple().isNVPTX();
    if (state.gpu) {
      // `constant` is the generic space on a GPU: a buffer (global memory) or a kernel parameter.
      static LangASMap map;
      const LangASMap*& current = TargetSpaces::of(compiler.getTarget());
      std::copy(std::begin(*current), std::end(*current), std::begin(map));
      map[static_cast<unsigned>(LangAS::opencl_constant)] = 0;
      current = &map;
    }
    return true;
  }
};
FrontendPluginRegistry::Add<Action> actionRegistration("msl", "Metal Shading Language");

// ---- Attributes.
struct MslAttribute : ParsedAttrInfo {
  MslAttribute() {
    OptArgs = 3;
  }
  bool diagAppertainsToDecl(Sema&, const ParsedAttr&, const Decl*) const override {
    return true;
  }

  AttrHandling handleDeclAttribute(Sema& sema, Decl* decl, const ParsedAttr& attr) const override {
    StringRef name = attr.getAttrName()->getName();
    name.consume_front("msl_");
    if (name == "__local")
      name = "threadgroup";
    std::string text = ("msl." + name).str();
    Expr* late = nullptr;  // instantiated with the template
    if (attr.getNumArgs() && !attr.isArgIdent(0) && attr.getArgAsExpr(0)->isValueDependent())
      late = attr.getArgAsExpr(0);
    else if (attr.getNumArgs())
      text += ":" + argumentText(sema, attr);
    decl->addAttr(AnnotateAttr::Create(sema.Context, text, &late, late ? 1 : 0, attr.getRange()));
    if (name == "initialised" && !isa<ParenExpr>(attr.getArgAsExpr(0)))
      sema.Diag(attr.getLoc(),
                sema.Diags.getCustomDiagID(
                    DiagnosticsEngine::Error,
                    "a threadgroup variable takes no value but {0} [threadgroup-initialiser]"));
    if (name == "function_constant")
      if (auto* variable = dyn_cast<VarDecl>(decl); variable && !isa<ParmVarDecl>(variable))
        functionConstant(sema, variable);
    return AttributeApplied;
  }

 private:
  static std::string argumentText(Sema& sema, const ParsedAttr& attr) {
    if (attr.isArgIdent(0))
      return attr.getArgAsIdent(0)->Ident->getName().str();
    const Expr* expr = attr.getArgAsExpr(0)->IgnoreParenImpCasts();
    if (auto* literal = dyn_cast<StringLiteral>(expr))
      return literal->getString().str();
    Expr::EvalResult result;
    if (auto* reference = dyn_cast<DeclRefExpr>(expr);
        reference && findAttribute(reference->getDecl(), "function_constant"))
      return reference->getDecl()->getName().str();
    if (expr->EvaluateAsInt(result, sema.Context))
      return std::to_string(result.Val.getInt().getExtValue());
    if (auto* reference = dyn_cast<DeclRefExpr>(expr))
      return reference->getDecl()->getName().str();
    return "";
  }

  // A function constant becomes a static with a literal initialiser, so it folds as on Metal. While
  // checking it has none: it is no constant expression.
  static void functionConstant(Sema& sema, VarDecl* variable) {
    ASTContext& context = sema.Context;
    SourceLocation loc = variable->getLocation();
    state.constants.push_back(variable);
    QualType type = context.removeAddrSpaceQualType(variable->getType().getNonReferenceType());
    type = context.getCanonicalType(type).getUnqualifiedType();
    auto found = state.values.find(integerArgument(findAttribute(variable, "function_constant")));
    // A launch is refused while a constant that its kernel uses has no value.
    std::string value = found == state.values.end() ? "0" : found->second;
    bool generating = state.manifest.empty();
    variable->setConstexpr(false);
    Expr* init = nullptr;
    if (type->isBooleanType())
      init = CXXBoolLiteralExpr::Create(context, value != "0", context.BoolTy, loc);
    else if (type->isIntegerType())
      init = IntegerLiteral::Create(
          context, llvm::APInt(context.getTypeSize(type), std::strtoll(value.c_str(), nullptr, 10)),
          type, loc);
    else if (type->isSpecificBuiltinType(BuiltinType::Float))
      init = FloatingLiteral::Create(context, llvm::APFloat(std::strtof(value.c_str(), nullptr)),
                                     true, type, loc);
    else
      sema.Diag(loc,
                sema.Diags.getCustomDiagID(
                    DiagnosticsEngine::Error,
                    "function constants here are bool, integers or float [function-constant]"));
    variable->setStorageClass(generating ? SC_Static : SC_Extern);
    if (generating && init)
      variable->setInit(init);
    // is_function_constant_defined(NAME) reads this sibling.
    auto* defined = VarDecl::Create(
        context, variable->getDeclContext(), loc, loc,
        &context.Idents.get(("__msl_defined_" + variable->getName()).str()),
        context.getAddrSpaceQualType(context.BoolTy.withConst(), LangAS::opencl_constant), nullptr,
        generating ? SC_Static : SC_Extern);
    if (generating)
      defined->setInit(
          CXXBoolLiteralExpr::Create(context, found != state.values.end(), context.BoolTy, loc));
    defined->setImplicit();
    sema.PushOnScopeChains(defined, sema.TUScope);
  }
};

#define ATTRIBUTE(NAME)                                                       \
  struct Attribute_##NAME : MslAttribute {                                    \
    Attribute_##NAME() {                                                      \
      static constexpr Spelling spellings[] = {{ParsedAttr::AS_CXX11, #NAME}, \
                                               {ParsedAttr::AS_GNU, #NAME}};  \
      Spellings = spellings;                                                  \
    }                                                                         \
  };                                                                          \
  static ParsedAttrInfoRegistry::Add<Attribute_##NAME> registration_##NAME(#NAME, "");
ATTRIBUTE(kernel)
ATTRIBUTE(msl_kernel)
ATTRIBUTE(msl_initialised)
ATTRIBUTE(buffer)
ATTRIBUTE(__local)  // [[threadgroup(n)]], where `threadgroup` is a macro for __local
ATTRIBUTE(host_name)
ATTRIBUTE(function_constant)
ATTRIBUTE(max_total_threads_per_threadgroup)
ATTRIBUTE(thread_position_in_grid)
ATTRIBUTE(thread_position_in_threadgroup)
ATTRIBUTE(thread_index_in_threadgroup)
ATTRIBUTE(thread_index_in_simdgroup)
ATTRIBUTE(thread_index_in_quadgroup)
ATTRIBUTE(simdgroup_index_in_threadgroup)
ATTRIBUTE(quadgroup_index_in_threadgroup)
ATTRIBUTE(threadgroup_position_in_grid)
ATTRIBUTE(threads_per_threadgroup)
ATTRIBUTE(threads_per_grid)
ATTRIBUTE(threadgroups_per_grid)
ATTRIBUTE(threads_per_simdgroup)
ATTRIBUTE(thread_execution_width)
ATTRIBUTE(simdgroups_per_threadgroup)
ATTRIBUTE(dispatch_threads_per_threadgroup)
ATTRIBUTE(dispatch_simdgroups_per_threadgroup)
ATTRIBUTE(texture)
ATTRIBUTE(sampler)

// Reaches every variable through `#pragma clang attribute` in metal_stdlib.
struct VariableAttribute : ParsedAttrInfo {
  VariableAttribute() {
    static constexpr Spelling spellings[] = {{ParsedAttr::AS_GNU, "msl_variable"}};
    Spellings = spellings;
    IsSupportedByPragmaAttribute = 1;
  }
  void getPragmaAttributeMatchRules(SmallVectorImpl<std::pair<attr::SubjectMatchRule, bool>>& rules,
                                    const LangOptions&) const override {
    rules.push_back({attr::SubjectMatchRule_variable, true});
  }
  bool diagAppertainsToDecl(Sema&, const ParsedAttr&, const Decl*) const override {
    return true;
  }

  AttrHandling handleDeclAttribute(Sema& sema, Decl* decl, const ParsedAttr&) const override {
    auto* variable = dyn_cast<VarDecl>(decl);
    if (!variable)
      return AttributeApplied;
    ASTContext& context = sema.Context;
    sema.getOpenCLOptions().support("cl_khr_fp16");
    sema.getOpenCLOptions().enable("cl_khr_fp16");
    // An array parameter with a space: forget the array, so that instantiation sees the pointer.
    auto* info = variable->getTypeSourceInfo();
    if (isa<ParmVarDecl>(variable) && info && info->getType()->isArrayType() &&
        info->getType().hasAddressSpace())
      retype(context, variable, context.getCanonicalType(variable->getType()));
    constantIsConst(context, variable);
    if (!isa<ParmVarDecl>(variable) && variable->isLocalVarDecl()) {
      LangAS space = variable->getType().getAddressSpace();
      if (variable->getStorageClass() == SC_Static)
        variable->addAttr(AnnotateAttr::Create(context, "msl.static_local", nullptr, 0));
      if (space == LangAS::opencl_local || space == LangAS::opencl_constant)
        variable->setStorageClass(SC_Static);
      // One threadgroup runs on one OS thread.
      if (space == LangAS::opencl_local && !state.gpu)
        variable->setTSCSpec(TSCS_thread_local);
    }
    return AttributeApplied;
  }

 private:
  static void retype(ASTContext& context, VarDecl* variable, QualType type) {
    variable->setType(type);
    variable->setTypeSourceInfo(context.getTrivialTypeSourceInfo(type, variable->getLocation()));
  }

  static void constantIsConst(ASTContext& context, VarDecl* variable) {
    QualType type = variable->getType();
    if (!type->isPointerType() && !type->isReferenceType())
      return;
    QualType target = type->getPointeeType();
    if (target.getAddressSpace() != LangAS::opencl_constant || target.isConstQualified() ||
        target->isFunctionType())
      return;
    retype(context, variable,
           type->isPointerType()
               ? context.getQualifiedType(context.getPointerType(target.withConst()),
                                          type.getQualifiers())
               : context.getLValueReferenceType(target.withConst()));
  }
};
ParsedAttrInfoRegistry::Add<VariableAttribute> variableRegistration("msl_variable", "");

}  // namespace
}  // namespace msl
