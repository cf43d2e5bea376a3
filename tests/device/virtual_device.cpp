// A device for tests, `vgpu`: two cards in the CPU's memory that keep CUDA's rules, under PyTorch's key PrivateUse1.
//
// Kernels are the CPU's, run on the same bytes, so results are the CPU's and times mean nothing. What CUDA refuses is
// refused: tensors of two devices in one operation (but CPU numbers of 0 dimensions where CUDA takes them, and CPU
// indexes), generators of another device, products of integers. An observer hears of each kernel that is launched, each
// time the host waits for the device, and each refusal. Python's side is `virtual_device.py`.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <string>
#include <unordered_map>
#include <unordered_set>

namespace {
using namespace at;
using Names = std::unordered_set<std::string>;
using MaybeTensor = std::optional<Tensor>;
using Sizes = c10::SymIntArrayRef;

constexpr auto KIND = DeviceType::PrivateUse1;
constexpr int COUNT = 2;
thread_local DeviceIndex current = 0;

// ---- what the observer hears ------------------------------------------------------------------------------------
using Observer = void (*)(const char* event, const char* operation);
Observer observer = nullptr;
bool counting = false;  // whether of launches and waits, too; refusals are always told
int64_t launches = 0;

void tell(const char* event, const std::string& operation) { if (observer) observer(event, operation.c_str()); }
void launched(const std::string& operation) {
  ++launches;
  if (counting) tell("launch", operation);
}
void waited(const std::string& operation) { if (counting) tell("wait", operation); }

// ---- memory, cards, generators ----------------------------------------------------------------------------------
struct Memory final : c10::Allocator {
  static void drop(void* bytes) { if (bytes) c10::GetCPUAllocator()->raw_deallocate(bytes); }
  c10::DataPtr allocate(size_t size) override {
    void* bytes = size ? c10::GetCPUAllocator()->raw_allocate(size) : nullptr;
    return {bytes, bytes, &drop, Device(KIND, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

DeviceIndex exchange(DeviceIndex index) {
  TORCH_CHECK(index < COUNT, "invalid device ordinal");
  const auto before = current;
  if (index >= 0) current = index;
  return before;
}
Device or_current(Device device) { return device.has_index() ? device : Device(KIND, current); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return KIND; }
  Device exchangeDevice(Device device) const override { return {KIND, exchange(device.index())}; }
  Device getDevice() const override { return {KIND, current}; }
  void setDevice(Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { if (device.index() >= 0) current = device.index(); }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, or_current(device)); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { waited("synchronize"); }
  void synchronizeDevice(DeviceIndex) const override { waited("synchronize"); }
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct CardGenerator final : c10::GeneratorImpl {
  Generator cpu = at::detail::createCPUGenerator();
  explicit CardGenerator(DeviceIndex index) : GeneratorImpl({KIND, index}, DispatchKeySet(DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  CardGenerator* clone_impl() const override {
    auto* copy = new CardGenerator(device_.index());
    copy->cpu = cpu.clone();
    return copy;
  }
};
bool cpu_numbers = false;  // cards draw from the CPU's default generator, and so what a run there would draw

Generator& generator_of(DeviceIndex index) {
  static std::vector<Generator> cards = {make_generator<CardGenerator>(0), make_generator<CardGenerator>(1)};
  return cards[index < 0 ? current : index];
}
Generator on_cpu(const Generator& generator) {
  return static_cast<CardGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return COUNT; }
  void setCurrentDevice(DeviceIndex index) const override { exchange(index); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchange(index < COUNT ? index : -1); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return generator_of(index); }
  Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<CardGenerator>(index < 0 ? current : index);
  }
  Device getDeviceFromPtr(void*) const override { return {KIND, current}; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = memory.allocate(size);
    if (storage.nbytes()) std::memcpy(fresh.mutable_get(), storage.data(), std::min(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
Hooks hooks;

// ---- the same bytes, seen from either side ----------------------------------------------------------------------
bool on_card(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

Tensor like(const Tensor& tensor, c10::Storage storage, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), tensor.dtype());
  auto* parts = made.unsafeGetTensorImpl();
  parts->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) parts->set_wrapped_number(true);
  return made;
}
Tensor seen_from(Device device, const Tensor& tensor) {
  const auto& own = tensor.storage();
  auto* kept = new c10::Storage(own);
  auto release = [](void* storage) { delete static_cast<c10::Storage*>(storage); };
  c10::DataPtr bytes(const_cast<void*>(own.data()), kept, release, device);
  auto* allocator = device.is_cpu() ? c10::GetCPUAllocator() : &memory;
  c10::Storage storage(c10::Storage::use_byte_size_t(), own.nbytes(), std::move(bytes), allocator, true);
  return like(tensor, std::move(storage), device.is_cpu() ? DispatchKey::CPU : DispatchKey::PrivateUse1);
}
Tensor on_cpu(const Tensor& tensor) { return on_card(tensor) ? seen_from(Device(kCPU), tensor) : tensor; }
MaybeTensor on_cpu(const MaybeTensor& tensor) { return tensor && tensor->defined() ? on_cpu(*tensor) : tensor; }
Tensor on_card(Device card, const Tensor& tensor) { return tensor.defined() ? seen_from(card, tensor) : tensor; }

// Replaces each tensor of an argument or result by what the function makes of it.
template <class Function>
void replace_tensors(IValue& value, Function function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) value = function(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(function(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<MaybeTensor> list;
    for (const MaybeTensor& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? MaybeTensor(function(*tensor)) : tensor);
    value = list;
  }
}

// ---- CUDA's rules -----------------------------------------------------------------------------------------------
// Beside pointwise operations these take a 0-dimensional tensor of the CPU.
const Names TAKES_NUMBERS = {
    "addcdiv", "addcdiv_", "addcmul", "addcmul_", "clamp", "clamp_", "clamp_max", "clamp_max_", "clamp_min",
    "clamp_min_", "fill", "fill_", "index_fill", "index_fill_", "index_put", "index_put_", "_index_put_impl_", "lerp",
    "lerp_", "linalg_vector_norm", "masked_fill", "masked_fill_", "scatter", "where", "_foreach_add_", "_foreach_div",
    "_foreach_div_", "_foreach_mul", "_foreach_mul_", "_fused_adam_", "_fused_adamw_",
    "_amp_foreach_non_finite_check_and_unscale_"};
const Names NO_INTEGERS = {"addbmm", "addmm", "addmv", "baddbmm", "bmm", "dot", "mm", "mv", "vdot"};
const Names INDEXES = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"};
// The size of the result is known when it is computed, or the result is a number of the host.
const Names WAITS = {"bincount", "equal", "masked_select", "nonzero", "nonzero_numpy", "unique_consecutive",
                     "unique_dim", "unique_dim_consecutive", "_unique", "_unique2"};
const Names FILLS = {"index_fill", "index_fill_", "masked_fill", "masked_fill_"};

// What there is to know of an operation.
struct Rules {
  std::string name;
  bool foreach_, indexes, puts, numbers, integers, waits, fills, writes_first;
  std::vector<bool> written, generators;

  explicit Rules(const c10::OperatorHandle& op) : name(op.schema().name().substr(op.schema().name().find("::") + 2)) {
    foreach_ = name.rfind("_foreach", 0) == 0;
    indexes = INDEXES.count(name);
    puts = indexes && name.find("put") != std::string::npos;
    numbers = TAKES_NUMBERS.count(name) || op.hasTag(Tag::pointwise);
    integers = !NO_INTEGERS.count(name);
    waits = WAITS.count(name);
    fills = FILLS.count(name) && op.schema().overload_name().find("Tensor") != std::string::npos;
    for (const auto& argument : op.schema().arguments()) {
      written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
      generators.push_back(argument.type()->str().find("Generator") != std::string::npos);
    }
    writes_first = !written.empty() && written[0];
  }
};
const Rules& rules_of(const c10::OperatorHandle& op) {
  static thread_local std::unordered_map<c10::OperatorName, Rules> known;
  auto found = known.find(op.operator_name());
  return (found != known.end() ? found : known.emplace(op.operator_name(), Rules(op)).first)->second;
}

[[noreturn]] void refuse(const Rules& rules, const std::string& reason) {
  tell("refused", rules.name + ": " + reason);
  TORCH_CHECK(false, reason, " (", rules.name, ")");
}

// The device an operation runs on, after CUDA's checks of where its tensors are; tells of waits.
Device checked(const Rules& rules, c10::ArrayRef<IValue> arguments) {
  Device card(kCPU);
  std::vector<Tensor> hosts;
  auto look = [&](const Tensor& tensor) {
    if (on_card(tensor)) {
      if (!card.is_cpu() && tensor.device() != card && !rules.foreach_)
        refuse(rules, "Expected all tensors to be on the same device, but found at least two devices");
      card = tensor.device();
    } else if (tensor.defined() && tensor.device().is_cpu() && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      hosts.push_back(tensor);
    }
    return tensor;
  };
  for (IValue value : arguments) {
    if (value.isDevice() && value.toDevice().type() == KIND) card = or_current(value.toDevice());
    else replace_tensors(value, look);
  }
  if (card.is_cpu()) return card;
  const bool into_card = arguments[0].isTensor() && on_card(arguments[0].toTensor());
  for (const Tensor& host : hosts) {
    if (rules.indexes) {
      if (!into_card) refuse(rules, "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
      bool is_index = false;
      for (const auto& index : arguments[1].toOptionalTensorVector()) is_index |= index && index->is_same(host);
      if (is_index) {
        waited("copy of an index to the device");
        continue;
      }
    }
    const bool written = rules.writes_first && arguments[0].isTensor() && arguments[0].toTensor().is_same(host);
    if (host.dim() != 0 || written || !rules.numbers)
      refuse(rules, "Expected all tensors to be on the same device, but found at least two devices, a card and cpu");
  }
  if (!rules.integers && c10::isIntegralType(arguments[0].toTensor().scalar_type(), true))
    refuse(rules, "not implemented for integers");
  if (rules.waits || (rules.fills && on_card(arguments.back().toTensor())) ||
      (rules.name == "repeat_interleave" && arguments.back().isNone()))
    waited(rules.name);
  if (rules.indexes && !(rules.puts && arguments[2].toTensor().dim() == 0))
    for (const auto& index : arguments[1].toOptionalTensorVector())
      if (index && index->defined() && index->scalar_type() == kBool) waited(rules.name + " with bools");
  return card;
}

// Runs any operation by its kernel for the CPU.
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& rules = rules_of(op);
  const auto begin = stack->size() - rules.written.size();
  const Device card = checked(rules, c10::ArrayRef<IValue>(*stack).slice(begin));
  launched(rules.name);
  struct Pair {
    Tensor own, cpu;
    const void* bytes;
    bool written;
  };
  std::vector<Pair> pairs;
  std::vector<Tensor> hosts;
  for (size_t i = 0; i < rules.written.size(); ++i) {
    IValue& value = (*stack)[begin + i];
    replace_tensors(value, [&](const Tensor& tensor) {
      if (!on_card(tensor)) return hosts.push_back(tensor), tensor;
      for (auto& pair : pairs)
        if (pair.own.is_same(tensor)) return pair.written = pair.written || rules.written[i], pair.cpu;
      const auto cpu = on_cpu(tensor);
      pairs.push_back({tensor, cpu, cpu.storage().data(), rules.written[i]});
      return cpu;
    });
    if (value.isDevice() && value.toDevice().type() == KIND) {
      value = Device(kCPU);
    } else if (rules.generators[i] && !card.is_cpu()) {
      if (!value.isNone() && value.toGenerator().device().type() != KIND)
        refuse(rules, "Expected a generator of the device, but found one of the CPU");
      if (!value.isNone()) value = on_cpu(value.toGenerator());
      else value = cpu_numbers ? at::detail::getDefaultCPUGenerator() : on_cpu(generator_of(card.index()));
    }
  }
  try {
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  } catch (const c10::IndexError&) {
    tell("refused", rules.name + ": index out of range, a failed assertion on the device");
    throw;
  }
  if (card.is_cpu()) return;
  for (auto& pair : pairs) {  // results that were given, and had to be resized
    const bool same = pair.cpu.sizes() == pair.own.sizes() && pair.cpu.strides() == pair.own.strides();
    if (pair.written && !(same && pair.cpu.storage().data() == pair.bytes))
      pair.own.unsafeGetTensorImpl()->shallow_copy_from(on_card(card, pair.cpu).getIntrusivePtr());
  }
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
    replace_tensors((*stack)[i], [&](const Tensor& result) {
      for (auto& pair : pairs)
        if (pair.cpu.is_same(result)) return pair.own;
      for (auto& host : hosts)
        if (host.is_same(result)) return result;
      for (auto& pair : pairs)  // a view of what was given
        if (result.numel() && pair.cpu.storage().is_alias_of(result.storage()))
          return like(result, pair.own.storage(), DispatchKey::PrivateUse1);
      return on_card(card, result);
    });
}

// ---- operations that are no kernels of the CPU ------------------------------------------------------------------
#define INTS(sizes) C10_AS_INTARRAYREF_SLOW(sizes)

Tensor empty_like_this(Sizes sizes, std::optional<ScalarType> dtype, std::optional<Layout>,
                       std::optional<Device> device, std::optional<bool>, std::optional<MemoryFormat> format) {
  c10::DeviceGuard guard(or_current(device.value_or(Device(KIND))));
  return at::detail::empty_generic(INTS(sizes), &memory, DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(Sizes sizes, Sizes strides, std::optional<ScalarType> dtype, std::optional<Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(or_current(device.value_or(Device(KIND))));
  return at::detail::empty_strided_generic(INTS(sizes), INTS(strides), &memory,
                                           DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.numel()) {
    if (on_card(from) == on_card(to) || (non_blocking && on_card(to))) launched("copy_");
    else waited(on_card(from) ? "copy to the host" : "copy to the device");
  }
  on_cpu(to).copy_(on_cpu(from));
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  return copy_from(from, to.resize_(from.sizes()), false);
}
Scalar item(const Tensor& tensor) {
  waited("item");
  return on_cpu(tensor).item();
}
Tensor view(const Tensor& tensor, Sizes sizes) { return native::view(tensor, INTS(sizes)); }
Tensor as_strided(const Tensor& tensor, Sizes sizes, Sizes strides, std::optional<c10::SymInt> offset) {
  return cpu::as_strided_symint(tensor, sizes, strides, offset);
}
Tensor reshape_alias(const Tensor& tensor, Sizes sizes, Sizes strides) {
  return native::_reshape_alias(tensor, INTS(sizes), INTS(strides));
}
const Tensor& resize(const Tensor& tensor, Sizes sizes, std::optional<MemoryFormat> format) {
  return native::resize_(tensor, INTS(sizes), format);
}
Tensor& set_tensor(Tensor& tensor, const Tensor& source) { return native::set_tensor_(tensor, source); }
Tensor& set_storage(Tensor& tensor, Storage source) { return native::set_(tensor, source); }
Tensor& set_part(Tensor& tensor, Storage source, c10::SymInt offset, Sizes sizes, Sizes strides) {
  return cpu::set__symint(tensor, source, offset, sizes, strides);
}
Tensor unfold(const Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  return native::unfold(tensor, dim, size, step);
}

Tensor convolution(const Tensor& input, const Tensor& weight, const MaybeTensor& bias, Sizes stride, Sizes padding,
                   Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups) {
  launched("convolution");
  return on_card(input.device(), at::convolution_symint(on_cpu(input), on_cpu(weight), on_cpu(bias), stride, padding,
                                                        dilation, transposed, output_padding, groups));
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, Sizes stride, Sizes padding, Sizes dilation,
    bool transposed, Sizes output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  launched("convolution_backward");
  const c10::SymInt outputs = weight.sym_size(0) * (transposed ? groups : c10::SymInt(1));
  auto [of_input, of_weight, of_bias] =
      at::convolution_backward_symint(on_cpu(grad), on_cpu(input), on_cpu(weight), Sizes(&outputs, 1), stride, padding,
                                      dilation, transposed, output_padding, groups, mask);
  const auto card = input.device();
  return {on_card(card, of_input), on_card(card, of_weight), on_card(card, of_bias)};
}

// The fused cell that PyTorch asks of accelerators.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cell,
                                             const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  launched("_thnn_fused_lstm_cell");
  auto gates = on_cpu(input) + on_cpu(hidden);
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias && bias->defined()) gates = gates + on_cpu(*bias);
  const auto parts = gates.chunk(4, 1);
  const auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), new_ = parts[2].tanh(), out = parts[3].sigmoid();
  const auto next = forget * on_cpu(cell) + in * new_;
  const auto card = input.device();
  const auto workspace = at::cat({in, forget, new_, out}, 1);
  return {on_card(card, out * next.tanh()), on_card(card, next), on_card(card, workspace)};
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const MaybeTensor& of_hidden, const MaybeTensor& of_cell,
                                                      const Tensor& cell_, const Tensor& next_,
                                                      const Tensor& workspace, bool has_bias) {
  launched("_thnn_fused_lstm_cell_backward");
  const auto cell = on_cpu(cell_), squashed = on_cpu(next_).tanh();
  const auto parts = on_cpu(workspace).chunk(4, 1);
  const auto in = parts[0], forget = parts[1], new_ = parts[2], out = parts[3];
  auto given = [&](const MaybeTensor& gradient) {
    return gradient && gradient->defined() ? on_cpu(*gradient) : at::zeros_like(cell);
  };
  const auto hidden = given(of_hidden), through = hidden * out * (1 - squashed * squashed) + given(of_cell);
  const auto gates = at::cat({through * new_ * in * (1 - in), through * cell * forget * (1 - forget),
                              through * in * (1 - new_ * new_), hidden * squashed * out * (1 - out)}, 1);
  const auto card = cell_.device();
  return {on_card(card, gates), on_card(card, through * forget),
          has_bias ? on_card(card, gates.sum(0)) : Tensor()};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_like_this); m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from); m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item); m.impl("view", view); m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias); m.impl("resize_", resize); m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage", set_storage); m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("unfold", unfold); m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward); m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}

// Whatever has a kernel for the CPU has one here: PyTorch would else put it together of many, where CUDA has one.
void register_kernels() {
  static const Names left_out = {
      "aten::_pin_memory", "aten::_scaled_dot_product_flash_attention_for_cpu",
      "aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::_to_copy", "aten::as_strided_",
      "aten::copy_", "aten::is_pinned", "aten::is_set_to", "aten::record_stream", "aten::set_"};
  static torch::Library library(torch::Library::IMPL, "aten", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || left_out.count(name.name) || !op ||
        !op->hasKernelForDispatchKey(DispatchKey::CPU) || op->hasKernelForDispatchKey(DispatchKey::PrivateUse1) ||
        op->hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd))
      continue;
    bool view = false;
    for (const auto& argument : op->schema().arguments())
      view |= argument.alias_info() && !argument.alias_info()->isWrite();
    if (view) continue;
    const auto overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    library.impl((name.name.substr(6) + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  }
}

// Autocast as CUDA's.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define UPPER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(UPPER)
#define TYPED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(TYPED)
}

TORCH_LIBRARY(vgpu, m) {
  m.def("rng_state", [](int64_t card) { return generator_of(card).get_state(); });
  m.def("set_rng_state", [](const Tensor& state, int64_t card) { generator_of(card).set_state(state); });
  m.def("seed", [](int64_t seed, int64_t card) { generator_of(card).set_current_seed(seed); });
  m.def("set_device", [](int64_t card) { exchange(card); });
  m.def("current_device", [](){ return int64_t(current); });
  m.def("cpu_numbers", [](bool on) { cpu_numbers = on; });
  m.def("count", [](bool on) { counting = on; });
  m.def("launches", [](){ return launches; });
}
}  // namespace

extern "C" void start(Observer told) {
  observer = told;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  register_kernels();
}
