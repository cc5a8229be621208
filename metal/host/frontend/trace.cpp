// LLVM pass, in the same plugin file: source positions for synchronising calls in every build; in a
// checked build also a call before each access to device, constant and threadgroup memory and to
// thread arrays, before each division of integers, branch counters, and red zones around variables.
#include <map>
#include <string>
#include <vector>

#include "llvm/Analysis/ValueTracking.h"
#include "llvm/Demangle/Demangle.h"
#include "llvm/IR/DebugInfoMetadata.h"
#include "llvm/IR/IRBuilder.h"
#include "llvm/IR/InstIterator.h"
#include "llvm/IR/Instructions.h"
#include "llvm/IR/IntrinsicInst.h"
#include "llvm/IR/Module.h"
#include "llvm/Passes/PassBuilder.h"
#include "llvm/Passes/PassPlugin.h"
#include "llvm/Transforms/Utils/BasicBlockUtils.h"

using namespace llvm;

namespace {

constexpr unsigned kDevice = 1, kConstant = 2, kThreadgroup = 3;  // -ffake-address-space-map
constexpr unsigned kStore = 1, kAtomic = 2, kThreadgroupAccess = 4, kUpdate = kStore | kAtomic | 8;
constexpr unsigned kConstantAccess = 16, kAlignShift = 8;
constexpr uint64_t kRedZone = 256;

bool isChecked(const Module& module) {
  return module.getNamedGlobal("__msl_checked");
}

// The driver names the folder of <metal_stdlib>, so that a report shows the line that called into
// it.
std::string shimFolder(const Module& module) {
  if (auto* global = module.getNamedGlobal("__msl_include"))
    if (auto* text = dyn_cast<ConstantDataArray>(global->getInitializer()))
      return text->getAsCString().str();
  return "/";
}

// Constants that describe places in the source: { file, line, column, order, function }.
class Sites {
 public:
  explicit Sites(Module& module) : module_(module), shim_(shimFolder(module)) {
    auto& context = module.getContext();
    auto* pointer = PointerType::get(context, 0);
    auto* word = Type::getInt32Ty(context);
    type_ = StructType::get(context, {pointer, word, word, word, pointer});
  }

  // Where in the user's source an instruction comes from; null when nowhere.
  const DILocation* user(const Instruction& instruction) const {
    const DILocation* loc = instruction.getDebugLoc();
    while (loc && StringRef(path(loc)).starts_with(shim_))
      loc = loc->getInlinedAt();
    return loc;
  }

  Constant* of(const Instruction& instruction) {
    std::string key;  // the whole chain of inlined calls: duplicates of one call share a site
    for (const DILocation* loc = instruction.getDebugLoc(); loc; loc = loc->getInlinedAt())
      key += path(loc) + ":" + std::to_string(loc->getLine()) + ":" +
             std::to_string(loc->getColumn()) + ";";
    if (const auto* function = instruction.getFunction())
      key += function->getName();
    auto& site = sites_[key];
    if (!site)
      site = make(user(instruction), function(instruction), sites_.size());
    return site;
  }

  Constant* make(const DILocation* loc, StringRef function, unsigned order) {
    auto& context = module_.getContext();
    auto number = [&](unsigned n) { return ConstantInt::get(Type::getInt32Ty(context), n); };
    auto* value = ConstantStruct::get(
        type_, {text(loc ? path(loc) : "?"), number(loc ? loc->getLine() : 0),
                number(loc ? loc->getColumn() : 0), number(order), text(function)});
    return new GlobalVariable(module_, type_, true, GlobalValue::PrivateLinkage, value,
                              "__msl_site");
  }

  Constant* text(StringRef string) {
    auto& global = texts_[string.str()];
    if (!global) {
      auto* data = ConstantDataArray::getString(module_.getContext(), string);
      global = new GlobalVariable(module_, data->getType(), true, GlobalValue::PrivateLinkage, data,
                                  "__msl_text");
    }
    return global;
  }

  std::string function(const Instruction& instruction) const {
    const DILocation* loc = user(instruction);
    if (!loc)
      return "";
    if (auto* program = loc->getScope()->getSubprogram())
      return program->getName().str();
    return "";
  }

  static std::string path(const DILocation* loc) {
    StringRef file = loc->getFilename();
    if (file.starts_with("/") || loc->getDirectory().empty())
      return file.str();
    return (loc->getDirectory() + "/" + file).str();
  }

 private:
  Module& module_;
  std::string shim_;
  StructType* type_;
  std::map<std::string, Constant*> sites_, texts_;
};

// A variable with room behind it that nothing may touch.
GlobalVariable* withRedZone(Module& module, GlobalVariable* old) {
  auto& context = module.getContext();
  auto* zone = ArrayType::get(Type::getInt8Ty(context), kRedZone);
  auto* type = StructType::get(context, {old->getValueType(), zone});
  auto* value = ConstantStruct::get(type, {old->getInitializer(), Constant::getNullValue(zone)});
  auto* grown = new GlobalVariable(module, type, old->isConstant(), old->getLinkage(), value, "",
                                   old, old->getThreadLocalMode(), old->getAddressSpace());
  grown->takeName(old);
  grown->setAlignment(Align(kRedZone));
  old->replaceAllUsesWith(grown);
  old->eraseFromParent();
  return grown;
}

// { name, bytes, function that returns the address } of each, as `symbol` and `symbol`_count.
class VariableTable {
 public:
  VariableTable(Module& module, Sites& sites) : module_(module), sites_(sites) {}

  void add(GlobalVariable* variable, StringRef name, uint64_t bytes) {
    auto* getter = Function::Create(FunctionType::get(pointer_, false),
                                    GlobalValue::InternalLinkage, "__msl_address", module_);
    IRBuilder<> builder(BasicBlock::Create(module_.getContext(), "", getter));
    Value* address = variable;
    if (variable->isThreadLocal())
      address = builder.CreateThreadLocalAddress(variable);
    builder.CreateRet(builder.CreateAddrSpaceCast(address, pointer_));
    entries_.push_back(
        ConstantStruct::get(entry_, {sites_.text(name), ConstantInt::get(size_, bytes), getter}));
  }

  void write(const std::string& symbol) {
    if (entries_.empty())
      return;
    auto* type = ArrayType::get(entry_, entries_.size());
    new GlobalVariable(module_, type, true, GlobalValue::ExternalLinkage,
                       ConstantArray::get(type, entries_), symbol + "s");
    new GlobalVariable(module_, size_, true, GlobalValue::ExternalLinkage,
                       ConstantInt::get(size_, entries_.size()), symbol + "_count");
  }

 private:
  Module& module_;
  Sites& sites_;
  PointerType* pointer_ = PointerType::get(module_.getContext(), 0);
  IntegerType* size_ = Type::getInt64Ty(module_.getContext());
  StructType* entry_ = StructType::get(module_.getContext(), {pointer_, size_, pointer_});
  std::vector<Constant*> entries_;
};

// Before optimisation.
struct Early : PassInfoMixin<Early> {
  PreservedAnalyses run(Module& module, ModuleAnalysisManager&) {
    internalise(module);
    threadgroupVariables(module);
    if (isChecked(module))
      branches(module);
    return PreservedAnalyses::none();
  }
  static bool isRequired() {
    return true;
  }

 private:
  // Only the launch stubs, which are extern "C", are called from outside.
  static void internalise(Module& module) {
    for (auto& function : module)
      if (!function.isDeclaration() && function.getName().starts_with("_Z")) {
        function.setComdat(nullptr);
        function.setLinkage(GlobalValue::InternalLinkage);
        function.setVisibility(GlobalValue::DefaultVisibility);
      }
  }

  // Other threads write these, so nothing may be concluded from this thread's stores alone.
  static void threadgroupVariables(Module& module) {
    std::vector<GlobalVariable*> variables;
    for (auto& global : module.globals())
      if (global.isThreadLocal() && global.hasInitializer())
        variables.push_back(&global);
    if (variables.empty())
      return;
    Sites sites(module);
    VariableTable table(module, sites);
    for (auto* variable : variables) {
      uint64_t bytes = module.getDataLayout().getTypeAllocSize(variable->getValueType());
      if (isChecked(module)) {
        variable->setInitializer(Constant::getNullValue(variable->getValueType()));
        variable = withRedZone(module, variable);
      }
      variable->setLinkage(GlobalValue::ExternalLinkage);
      variable->setVisibility(GlobalValue::HiddenVisibility);
      variable->setDSOLocal(true);
      if (isChecked(module))
        table.add(variable, localName(variable->getName()), bytes);
    }
    table.write("__msl_threadgroup_variable");
  }

  // A local static's mangled name ends in E<length><name>, and sometimes a number.
  static StringRef localName(StringRef mangled) {
    for (size_t at = mangled.size(); (at = mangled.rfind('E', at)) != StringRef::npos && at; --at) {
      StringRef rest = mangled.substr(at + 1);
      size_t length = 0;
      if (!rest.consumeInteger(10, length) && length && length <= rest.size())
        return rest.take_front(length);
    }
    return mangled;
  }

  // One call for each conditional branch of the user's source; Late turns those that optimisation
  // could not decide into counters.
  static void branches(Module& module) {
    Sites sites(module);
    auto& context = module.getContext();
    auto* pointer = PointerType::get(context, 0);
    auto* flag = Type::getInt1Ty(context);
    auto callee =
        module.getOrInsertFunction("__msl_branch", Type::getVoidTy(context), flag, pointer);
    auto* function = cast<Function>(callee.getCallee());
    function->setOnlyAccessesInaccessibleMemory();
    function->setDoesNotThrow();
    function->setWillReturn();
    std::vector<Instruction*> found;
    for (auto& f : module)
      for (auto& instruction : instructions(f))
        if (isa<BranchInst, SwitchInst>(instruction) && instruction.getDebugLoc() &&
            sites.user(instruction) == instruction.getDebugLoc().get())
          found.push_back(&instruction);
    for (auto* instruction : found) {
      IRBuilder<> builder(instruction);
      auto emit = [&](Value* condition, unsigned choice) {
        builder.CreateCall(callee, {condition, sites.make(sites.user(*instruction),
                                                          sites.function(*instruction), choice)});
      };
      if (auto* branch = dyn_cast<BranchInst>(instruction)) {
        if (branch->isConditional())
          emit(branch->getCondition(), 0);
      } else {
        auto* choose = cast<SwitchInst>(instruction);
        unsigned choice = 0;
        for (auto& option : choose->cases())
          emit(builder.CreateICmpEQ(choose->getCondition(), option.getCaseValue()), ++choice);
      }
    }
  }
};

// After optimisation.
struct Late : PassInfoMixin<Late> {
  PreservedAnalyses run(Module& module, ModuleAnalysisManager&) {
    Sites sites(module);
    for (const char* name : {"__msl_threadgroup_barrier", "__msl_simdgroup_barrier",
                             "__msl_exchange", "__msl_uninitialised", "__msl_index"})
      if (auto* function = module.getFunction(name))
        for (auto* user : function->users())
          if (auto* call = dyn_cast<CallInst>(user))
            call->setArgOperand(call->arg_size() - 1, sites.of(*call));
    if (isChecked(module)) {
      counters(module);
      constants(module, sites);
      for (auto& function : module) {
        accesses(function, sites);
        divisions(function, sites);
        unwritten(function, sites);
      }
    }
    return PreservedAnalyses::none();
  }
  static bool isRequired() {
    return true;
  }

 private:
  // { site, times taken, times not taken }
  static void counters(Module& module) {
    auto* function = module.getFunction("__msl_branch");
    if (!function)
      return;
    auto& context = module.getContext();
    auto* pointer = PointerType::get(context, 0);
    auto* count = Type::getInt64Ty(context);
    auto* type = StructType::get(context, {pointer, count, count});
    std::map<Value*, Constant*> made;
    std::vector<Constant*> table;
    std::vector<CallInst*> calls;
    for (auto* user : function->users())
      calls.push_back(cast<CallInst>(user));
    for (auto* call : calls) {
      auto* condition = call->getArgOperand(0);
      if (!isa<Constant>(condition)) {
        auto* site = cast<Constant>(call->getArgOperand(1));
        auto& counter = made[site];
        if (!counter) {
          auto* zero = ConstantInt::get(count, 0);
          counter =
              new GlobalVariable(module, type, false, GlobalValue::InternalLinkage,
                                 ConstantStruct::get(type, {site, zero, zero}), "__msl_counter");
          table.push_back(counter);
        }
        IRBuilder<> builder(call);
        auto* index = builder.CreateSelect(condition, builder.getInt32(1), builder.getInt32(2));
        auto* place = builder.CreateGEP(type, counter, {builder.getInt32(0), builder.getInt32(1)});
        place = builder.CreateGEP(count, place, builder.CreateSub(index, builder.getInt32(1)));
        builder.CreateStore(
            builder.CreateAdd(builder.CreateLoad(count, place), ConstantInt::get(count, 1)), place);
      }
      call->eraseFromParent();
    }
    auto* array = ArrayType::get(pointer, table.size());
    new GlobalVariable(module, array, true, GlobalValue::ExternalLinkage,
                       ConstantArray::get(array, table), "__msl_branches");
    new GlobalVariable(module, count, true, GlobalValue::ExternalLinkage,
                       ConstantInt::get(count, table.size()), "__msl_branch_count");
  }

  // Tables of `constant` values at program scope that optimisation left.
  static void constants(Module& module, Sites& sites) {
    std::vector<GlobalVariable*> found;
    for (auto& global : module.globals())
      if (global.getAddressSpace() == kConstant && global.hasInitializer())
        found.push_back(&global);
    VariableTable table(module, sites);
    for (auto* variable : found) {
      uint64_t bytes = module.getDataLayout().getTypeAllocSize(variable->getValueType());
      std::string name = demangle(variable->getName());
      table.add(withRedZone(module, variable), name, bytes);
    }
    table.write("__msl_constant");
  }

  // A divisor of 0, or of -1 under the least integer, ends a process; it is reported and becomes 1.
  static void divisions(Function& function, Sites& sites) {
    auto& module = *function.getParent();
    auto& context = module.getContext();
    auto* word = Type::getInt32Ty(context);
    auto* wide = Type::getInt64Ty(context);
    std::vector<BinaryOperator*> found;
    for (auto& i : instructions(function))
      if (auto* binary = dyn_cast<BinaryOperator>(&i))
        if (binary->isIntDivRem() && !isa<Constant>(binary->getOperand(1)) &&
            binary->getType()->getScalarSizeInBits() <= 64)
          found.push_back(binary);
    auto callee = module.getOrInsertFunction("__msl_divisor", wide, wide, wide, word,
                                             PointerType::get(context, 0));
    for (auto* binary : found) {
      IRBuilder<> builder(binary);
      bool isSigned =
          binary->getOpcode() == Instruction::SDiv || binary->getOpcode() == Instruction::SRem;
      auto* type = binary->getType();
      unsigned bits = type->getScalarSizeInBits();
      auto safe = [&](Value* dividend, Value* divisor) {
        auto* call =
            builder.CreateCall(callee, {builder.CreateIntCast(dividend, wide, isSigned),
                                        builder.CreateIntCast(divisor, wide, isSigned),
                                        builder.getInt32(isSigned ? bits : 0), sites.of(*binary)});
        call->setDebugLoc(binary->getDebugLoc());
        return builder.CreateTrunc(call, divisor->getType());
      };
      Value *dividend = binary->getOperand(0), *divisor = binary->getOperand(1);
      if (auto* vector = dyn_cast<FixedVectorType>(type))
        for (unsigned i = 0; i < vector->getNumElements(); ++i)
          divisor = builder.CreateInsertElement(divisor,
                                                safe(builder.CreateExtractElement(dividend, i),
                                                     builder.CreateExtractElement(divisor, i)),
                                                i);
      else
        divisor = safe(dividend, divisor);
      binary->setOperand(1, divisor);
    }
  }

  // Whether a value only moves from memory that threads share, where any bits may lie.
  static bool isMoved(Value* value, unsigned depth = 4) {
    if (auto* load = dyn_cast<LoadInst>(value))
      return load->getPointerAddressSpace() != 0;
    if (!depth || !isa<PHINode, SelectInst, CastInst, ExtractElementInst, InsertElementInst,
                       ShuffleVectorInst>(value))
      return false;
    if (isa<CastInst>(value) && !isa<BitCastInst>(value))
      return false;
    for (auto& operand : cast<Instruction>(value)->operands())
      if (operand->getType()->isFPOrFPVectorTy() && !isa<Constant>(operand) &&
          !isMoved(operand, depth - 1))
        return false;
    return true;
  }

  // A thread's variable that nothing has written is a NaN with all bits set, and so is what is
  // computed from it; a store of one to memory that threads share is reported.
  static void unwritten(Function& function, Sites& sites) {
    auto& module = *function.getParent();
    auto& context = module.getContext();
    std::vector<StoreInst*> found;
    for (auto& i : instructions(function))
      if (auto* store = dyn_cast<StoreInst>(&i))
        if (store->getPointerAddressSpace() != 0 &&
            store->getValueOperand()->getType()->isFPOrFPVectorTy() &&
            !isMoved(store->getValueOperand()))
          found.push_back(store);
    auto callee = module.getOrInsertFunction("__msl_uninitialised", Type::getVoidTy(context),
                                             PointerType::get(context, 0));
    for (auto* store : found) {
      IRBuilder<> builder(store);
      auto* value = store->getValueOperand();
      auto* type = value->getType();
      unsigned bits = type->getScalarSizeInBits();
      auto* integers = type->getWithNewType(builder.getIntNTy(bits));
      auto* top = builder.CreateLShr(builder.CreateBitCast(value, integers), bits - 16);
      auto* all = builder.CreateICmpEQ(top, ConstantInt::get(integers, 0xffff));
      if (type->isVectorTy())
        all = builder.CreateOrReduce(all);
      auto* then = SplitBlockAndInsertIfThen(all, store, false);
      auto* call = CallInst::Create(callee, {sites.of(*store)}, "", then->getIterator());
      call->setDebugLoc(store->getDebugLoc());
    }
  }

  struct Access {
    Instruction* instruction;
    unsigned operand;
    Value* size;
    unsigned flags;
    AllocaInst* array;  // a thread's own
  };

  static void accesses(Function& function, Sites& sites) {
    auto& module = *function.getParent();
    auto& context = module.getContext();
    auto& layout = module.getDataLayout();
    auto* word = Type::getInt32Ty(context);
    auto* pointer = PointerType::get(context, 0);
    std::vector<Access> found;
    auto add = [&](Instruction& i, unsigned operand, Value* size, MaybeAlign align,
                   unsigned flags) {
      auto* address = i.getOperand(operand);
      unsigned space = address->getType()->getPointerAddressSpace();
      if (space == kDevice || space == kConstant || space == kThreadgroup) {
        flags |= space == kThreadgroup ? kThreadgroupAccess
                 : space == kConstant  ? kConstantAccess
                                       : 0;
        flags |= static_cast<unsigned>(align.valueOrOne().value()) << kAlignShift;
        found.push_back({&i, operand, size, flags, nullptr});
      } else if (auto* array = overrun(address, size, layout)) {
        found.push_back({&i, operand, size, flags, array});
      }
    };
    auto fixed = [&](Type* type) { return ConstantInt::get(word, layout.getTypeStoreSize(type)); };
    for (auto& i : instructions(function)) {
      if (auto* load = dyn_cast<LoadInst>(&i)) {
        add(i, 0, fixed(load->getType()), load->getAlign(), load->isAtomic() ? kAtomic : 0);
      } else if (auto* store = dyn_cast<StoreInst>(&i)) {
        add(i, 1, fixed(store->getValueOperand()->getType()), store->getAlign(),
            kStore | (store->isAtomic() ? kAtomic : 0));
      } else if (auto* update = dyn_cast<AtomicRMWInst>(&i)) {
        add(i, 0, fixed(update->getType()), update->getAlign(), kUpdate);
      } else if (auto* exchange = dyn_cast<AtomicCmpXchgInst>(&i)) {
        add(i, 0, fixed(exchange->getNewValOperand()->getType()), exchange->getAlign(), kUpdate);
      } else if (auto* copy = dyn_cast<MemTransferInst>(&i)) {
        add(i, 1, copy->getLength(), copy->getSourceAlign(), 0);
        add(i, 0, copy->getLength(), copy->getDestAlign(), kStore);
      } else if (auto* set = dyn_cast<MemSetInst>(&i)) {
        add(i, 0, set->getLength(), set->getDestAlign(), kStore);
      }
    }
    // They return the pointer to use: a scratch place instead of one that is out of bounds.
    auto shared = module.getOrInsertFunction("__msl_access", pointer, pointer, word, word, pointer);
    auto own = module.getOrInsertFunction("__msl_thread_access", pointer, pointer, word, word,
                                          pointer, word, pointer);
    for (auto& access : found) {
      IRBuilder<> builder(access.instruction);
      auto* address = access.instruction->getOperand(access.operand);
      auto* generic = builder.CreateAddrSpaceCast(address, pointer);
      auto* size = builder.CreateZExtOrTrunc(access.size, word);
      auto* flags = builder.getInt32(access.flags);
      auto* site = sites.of(*access.instruction);
      auto* call = access.array ? builder.CreateCall(
                                      own, {generic, size, flags, access.array,
                                            builder.getInt32(bytesOf(access.array, layout)), site})
                                : builder.CreateCall(shared, {generic, size, flags, site});
      call->setDebugLoc(access.instruction->getDebugLoc());
      access.instruction->setOperand(access.operand,
                                     builder.CreateAddrSpaceCast(call, address->getType()));
      unaligned(access.instruction);
    }
  }

  static uint64_t bytesOf(AllocaInst* array, const DataLayout& layout) {
    auto size = array->getAllocationSize(layout);
    return size ? size->getFixedValue() : 0;
  }

  // The thread array that an access may leave; null when it cannot.
  static AllocaInst* overrun(Value* address, Value* size, const DataLayout& layout) {
    auto* array = dyn_cast<AllocaInst>(getUnderlyingObject(address, 0));
    auto* length = dyn_cast<ConstantInt>(size);
    if (!array || !length || !bytesOf(array, layout))
      return nullptr;
    int64_t offset = 0;
    if (GetPointerBaseWithConstantOffset(address, offset, layout) == array && offset >= 0 &&
        offset + length->getZExtValue() <= bytesOf(array, layout))
      return nullptr;
    return array;
  }

  // The call has looked at the address: where it is misaligned the run goes on.
  static void unaligned(Instruction* instruction) {
    if (auto* load = dyn_cast<LoadInst>(instruction); load && !load->isAtomic())
      load->setAlignment(Align(1));
    else if (auto* store = dyn_cast<StoreInst>(instruction); store && !store->isAtomic())
      store->setAlignment(Align(1));
    else if (auto* memory = dyn_cast<MemIntrinsic>(instruction))
      memory->setDestAlignment(Align(1));
    if (auto* copy = dyn_cast<MemTransferInst>(instruction))
      copy->setSourceAlignment(Align(1));
  }
};

}  // namespace

extern "C" LLVM_ATTRIBUTE_WEAK PassPluginLibraryInfo llvmGetPassPluginInfo() {
  return {LLVM_PLUGIN_API_VERSION, "msl", "1", [](PassBuilder& builder) {
            builder.registerPipelineStartEPCallback(
                [](ModulePassManager& manager, OptimizationLevel) { manager.addPass(Early()); });
            builder.registerOptimizerLastEPCallback(
                [](ModulePassManager& manager, OptimizationLevel) { manager.addPass(Late()); });
          }};
}
