// The operators of a CUDA device that is not there: copies, views and memory by hand, all others by torch's CPU kernels.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "machine.h"

namespace fake {

Machine& machine() { return Machine::get(); }

// ---- which device and which stream a thread uses

thread_local int current_device = 0;
thread_local std::array<int, MAX_DEVICES> current_streams = {0, 1, 2, 3, 4, 5, 6, 7};
thread_local bool is_inside = false;  // an operator runs, and moves its arguments to the host and back

int current_stream(int device) { return current_streams.at(device); }
// torch's name of a default stream is 0 on every device.
c10::Stream to_torch(int stream) {
  int device = machine().device_of_stream(stream);
  c10::Device on(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  return c10::Stream(c10::Stream::UNSAFE, on, stream < MAX_DEVICES ? 0 : stream);
}
int from_torch(const c10::Stream& stream) { return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id()); }
int checked(int device) {
  TORCH_CHECK(device >= 0 && device < machine().num_devices, "CUDA error: invalid device ordinal ", device);
  return device;
}

// ---- what torch's own detector of races (torch.cuda._sanitizer) is told, as torch built with CUDA tells it. The detector is Python,
// and is never called under the machine's lock: another thread may hold Python's lock, and wait for that one.

template <typename Call>
void tell(Call call) {
  if (const c10::impl::PyInterpreter* python = c10::impl::GPUTrace::get_trace()) call(**python);
}
uintptr_t number_of(const void* thing) { return reinterpret_cast<uintptr_t>(thing); }
uintptr_t name_of_stream(int stream) { return static_cast<uintptr_t>(to_torch(stream).id()); }

void tell_recorded(const Event* event, int stream) {
  tell([&](const auto& python) { python.trace_gpu_event_record(c10::kCUDA, number_of(event), name_of_stream(stream)); });
}
void tell_blocked(const Event* event, int stream) {
  tell([&](const auto& python) { python.trace_gpu_event_wait(c10::kCUDA, number_of(event), name_of_stream(stream)); });
}
// Of a stream, or in an operator or a copy. torch.cuda.set_sync_debug_mode() has torch say so.
void tell_synchronized(int stream) {
  TORCH_CHECK(machine().sync_debug_mode < 2, "called a synchronizing CUDA operation");
  if (machine().sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
  tell([&](const auto& python) { python.trace_gpu_stream_synchronization(c10::kCUDA, name_of_stream(stream)); });
}

// ---- memory

void release(void* address) {
  if (address == nullptr) return;
  tell([&](const auto& python) { python.trace_gpu_memory_deallocation(c10::kCUDA, number_of(address)); });
  machine().free(static_cast<char*>(address));
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(current_device));
    if (num_bytes == 0) return {nullptr, nullptr, &release, device};
    char* address = machine().allocate(current_device, num_bytes, current_stream(current_device));
    tell([&](const auto& python) { python.trace_gpu_memory_allocation(c10::kCUDA, number_of(address)); });
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override {
    Opened opened;
    std::memcpy(target, source, num_bytes);
  }
} device_allocator;

void release_pinned(void* address) { machine().free_pinned(static_cast<char*>(address)); }

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    char* address = machine().allocate_pinned(num_bytes, current_device);
    return {address, address, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* target, const void* source, size_t num_bytes) const override { std::memcpy(target, source, num_bytes); }
} pinned_allocator;

struct OnDevice {  // the current one, for a while
  int before = current_device;
  explicit OnDevice(int device) { current_device = checked(device); }
  ~OnDevice() { current_device = before; }
};

// ---- operators by hand

at::Tensor& copy_(at::Tensor& self, const at::Tensor& given, bool non_blocking) {
  if (self.numel() == 0) return self;
  at::Tensor source = given.sizes() == self.sizes() ? given : given.expand(self.sizes());
  View to(self), from(source);
  if (is_inside) {
    Machine::move(to, from);
  } else if (self.is_cuda() && source.is_cuda()) {
    int there = self.get_device(), here = source.get_device(), stream = current_stream(here);
    if (there != here) machine().block(machine().record(current_stream(there)), stream);
    machine().copy_on_devices(to, from, stream);
    if (there != here) machine().block(machine().record(stream), current_stream(there));
  } else if (self.is_cuda()) {
    int stream = current_stream(self.get_device());
    if (!machine().copy_to_device(to, from, stream, non_blocking)) tell_synchronized(stream);
  } else {
    int stream = current_stream(source.get_device());
    if (!machine().copy_to_host(to, from, stream, non_blocking)) tell_synchronized(stream);
  }
  return self;
}
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::Tensor result = target;
  return copy_(result, source, non_blocking);
}
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  at::Tensor result = target;
  if (result.sizes() != source.sizes()) result.resize_(source.sizes());
  return copy_(result, source, false);
}

using Sizes = c10::IntArrayRef;
constexpr c10::DispatchKeySet CUDA_KEY(c10::DispatchKey::CUDA);

at::Tensor empty(Sizes sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice there(device && device->has_index() ? device->index() : current_device);
  return at::detail::empty_generic(sizes, &device_allocator, CUDA_KEY, at::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(Sizes sizes, Sizes strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice there(device && device->has_index() ? device->index() : current_device);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, CUDA_KEY, at::dtype_or_default(dtype));
}
const at::Tensor& resize_(const at::Tensor& self, Sizes sizes, std::optional<at::MemoryFormat>) {
  OnDevice there(self.get_device());
  Opened opened;
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), sizes, std::nullopt);
  return self;
}
at::Tensor& set_storage_offset(at::Tensor& self, at::Storage storage, int64_t offset, Sizes sizes, Sizes strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (strides.data() != nullptr && !strides.empty()) {
    impl->set_sizes_and_strides(sizes, strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t numel = static_cast<int64_t>(storage.nbytes()) / self.element_size();
  return set_storage_offset(self, std::move(storage), 0, {numel}, {});
}
at::Tensor view(const at::Tensor& self, Sizes sizes) { return at::native::view(self, sizes); }
at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}
at::Tensor as_strided(const at::Tensor& self, Sizes sizes, Sizes strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}
at::Tensor reshape_alias(const at::Tensor& self, Sizes sizes, Sizes strides) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, self.storage_offset());
}
void record_stream(at::Tensor& self, c10::Stream stream) { machine().record_stream(self.storage().data(), from_torch(stream)); }
bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() && self.storage_offset() == other.storage_offset() &&
         self.sizes() == other.sizes() && self.strides() == other.strides();
}

// ---- all others

// Operators that read a tensor of the host's beside those of the device, as CUDA's do.
bool may_mix(const std::string& name) {
  static const std::set<std::string> names = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
                                              "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::_local_scalar_dense"};
  return names.count(name) > 0;
}
// How often the host waits in an operator for values that it needs itself: most often for the shape of the result.
int num_waits_for_values(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const std::map<std::string, int> names = {{"aten::nonzero", 1}, {"aten::masked_select", 1}, {"aten::_unique", 1}, {"aten::_unique2", 1},
                                                   {"aten::unique_dim", 1}, {"aten::unique_consecutive", 1},
                                                   {"aten::repeat_interleave", 2},  // how many, and whether one is negative
                                                   {"aten::bincount", 2}};          // the least and the largest
  const auto& arguments = op.schema().arguments();
  auto given = [&](const char* name) -> const c10::IValue* {
    auto index = op.schema().argumentIndexWithName(name);
    return index ? &stack[stack.size() - arguments.size() + *index] : nullptr;
  };
  const std::string& name = op.schema().name();
  if (name == "aten::_index_put_impl_") {  // numbers are made of a mask, unless one value is put where it says
    const at::Tensor& values = given("values")->toTensor();
    if (values.numel() == 1 && values.is_cpu()) return 0;
    int found = 0;
    for (const std::optional<at::Tensor>& one : given("indices")->toOptionalTensorVector()) {
      found += one && one->is_cuda() && (one->scalar_type() == at::kBool || one->scalar_type() == at::kByte);
    }
    return found;
  }
  const c10::IValue* size = given("output_size");
  if (name == "aten::repeat_interleave" && size != nullptr && !size->isNone()) return 0;
  auto found = names.find(name);
  return found == names.end() ? 0 : found->second;
}

struct Arguments {
  int device = -1;
  std::vector<std::pair<View, bool>> views;  // and whether it is written
};

Arguments look_at(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  Arguments found;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  size_t first = stack.size() - arguments.size();
  bool has_host_tensor = false;
  auto add = [&](const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return;
    if (!tensor.is_cuda()) {
      has_host_tensor = has_host_tensor || (tensor.is_cpu() && tensor.dim() > 0);
      return;
    }
    TORCH_CHECK(found.device < 0 || found.device == tensor.get_device(), "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                found.device, " and cuda:", tensor.get_device(), "! (fake device, in ", schema.name(), ")");
    found.device = tensor.get_device();
    found.views.emplace_back(View(tensor), is_written);
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = stack[first + i];
    const auto* alias = arguments[i].alias_info();
    bool is_written = alias != nullptr && alias->isWrite();
    if (value.isTensor()) {
      add(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) add(tensor, is_written);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
        if (tensor) add(*tensor, is_written);
      }
    } else if (value.isDevice() && value.toDevice().is_cuda() && found.device < 0) {
      found.device = value.toDevice().has_index() ? value.toDevice().index() : current_device;
    }
  }
  TORCH_CHECK(!has_host_tensor || found.views.empty() || may_mix(schema.name()),
              "Expected all tensors to be on the same device, but found at least two devices, cuda:", found.device, " and cpu! (fake device, in ",
              schema.name(), ")");
  if (found.device < 0) found.device = current_device;
  return found;
}

std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < MAX_DEVICES; ++i) made.push_back(at::detail::createCPUGenerator(1000 + i));
    return made;
  }();
  return all;
}

// A device has random numbers of its own.
void use_generator(const c10::OperatorHandle& op, torch::jit::Stack& stack, int device) {
  const auto& arguments = op.schema().arguments();
  size_t first = stack.size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].type()->str().find("Generator") == std::string::npos) continue;
    if (stack[first + i].isNone()) stack[first + i] = generators()[device];
    bool is_devices = std::ranges::count(generators(), stack[first + i].toGenerator()) > 0;
    TORCH_CHECK(is_devices, "Expected a 'cuda' device type for generator but found 'cpu' (fake device, in ", op.schema().name(), ")");
  }
}

// By the processor's kernel; of histc that one knows no whole numbers, which CUDA's does.
void run_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  size_t first = stack->size() - op.schema().arguments().size();
  if (op.schema().name() != "aten::histc" || !at::isIntegralType((*stack)[first].toTensor().scalar_type(), false)) {
    at::native::cpu_fallback(op, stack);
    return;
  }
  auto dtype = (*stack)[first].toTensor().scalar_type();
  (*stack)[first] = (*stack)[first].toTensor().to(at::kDouble);
  at::native::cpu_fallback(op, stack);
  stack->back() = stack->back().toTensor().to(dtype);
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  if (is_inside) {
    at::native::cpu_fallback(op, stack);
    return;
  }
  const std::string& name = op.schema().name();
  Arguments arguments = look_at(op, *stack);
  int stream = current_stream(arguments.device);
  OnDevice there(arguments.device);
  {
    Locked locked(lock_of_all());
    machine().catch_up(stream);
    machine().issue(stream, name);
    ++machine().counters.launches[name];
    for (const auto& [view, is_written] : arguments.views) machine().note(stream, view, is_written, name);
  }
  use_generator(op, *stack, arguments.device);
  int num_waits = num_waits_for_values(op, *stack);
  {
    is_inside = true;
    struct Leave {
      ~Leave() { is_inside = false; }
    } leave;
    Opened opened;
    run_kernel(op, stack);
  }
  bool gives_tensors = op.schema().returns().empty();
  {
    Locked locked(lock_of_all());
    for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
      const c10::IValue& value = (*stack)[i];
      gives_tensors = gives_tensors || value.isTensor() || value.isTensorList();
      if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) {
        machine().note(stream, View(value.toTensor()), true, name);
      } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector()) {
          if (tensor.is_cuda()) machine().note(stream, View(tensor), true, name);
        }
      }
    }
    machine().catch_up(stream);
  }
  for (num_waits += !gives_tensors; num_waits > 0; --num_waits) {
    machine().synchronize(machine().record(stream), name);
    tell_synchronized(stream);
  }
}

// ---- what torch asks about devices

int make_stream(int device) {
  int stream = machine().new_stream(device);
  tell([&](const auto& python) { python.trace_gpu_stream_creation(c10::kCUDA, name_of_stream(stream)); });
  return stream;
}
Event* make_event() {
  auto* event = new Event;
  tell([&](const auto& python) { python.trace_gpu_event_creation(c10::kCUDA, number_of(event)); });
  return event;
}
void delete_event(Event* event) {
  tell([&](const auto& python) { python.trace_gpu_event_deletion(c10::kCUDA, number_of(event)); });
  delete event;
}
void record_event(Event* event, int stream) {
  *event = machine().record(stream);
  tell_recorded(event, stream);
}
void block_stream(const Event* event, int stream) {
  machine().block(*event, stream);
  tell_blocked(event, stream);
}
void synchronize_event(const Event* event, const std::string& what) {
  if (!machine().is_known_done(*event)) machine().synchronize(*event, what);  // else it is no wait
  tell([&](const auto& python) { python.trace_gpu_event_synchronization(c10::kCUDA, number_of(event)); });
}
void synchronize_device(int device) {
  machine().synchronize_device(device);
  tell([&](const auto& python) { python.trace_gpu_device_synchronization(c10::kCUDA); });
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(current_device)}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) current_device = checked(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return to_torch(current_stream(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return to_torch(index(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override { return to_torch(make_stream(index(device))); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int& current = current_streams.at(stream.device_index());
    c10::Stream before = to_torch(current);
    current = from_torch(stream);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(machine().num_devices); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = make_event();
    record_event(static_cast<Event*>(*event), from_torch(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) block_stream(static_cast<Event*>(event), from_torch(stream));
  }
  bool queryEvent(void* event) const override { return event == nullptr || machine().query(*static_cast<Event*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) synchronize_event(static_cast<Event*>(event), "event.synchronize");
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event != nullptr) delete_event(static_cast<Event*>(event));
  }
  bool queryStream(const c10::Stream& stream) const override {
    Event event = machine().record(from_torch(stream));
    return machine().query(event);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    machine().synchronize(machine().record(from_torch(stream)), "stream.synchronize");
    tell_synchronized(from_torch(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override { fake::synchronize_device(device < 0 ? current_device : device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    machine().record_stream(data.get(), from_torch(stream));
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 1.0; }

 private:
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
};

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex device) const override { return machine().is_touched(device); }
  at::DeviceIndex deviceCount() const override { return static_cast<at::DeviceIndex>(machine().num_devices); }
  at::DeviceIndex getCurrentDevice() const override { return static_cast<at::DeviceIndex>(fake::current_device); }
  at::DeviceIndex current_device() const override { return static_cast<at::DeviceIndex>(fake::current_device); }
  int getNumGPUs() const override { return machine().num_devices; }
  bool isPinnedPtr(const void* address) const override { return machine().is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  at::Device getDeviceFromPtr(void* address) const override {
    return {at::kCUDA, static_cast<at::DeviceIndex>(std::max(0, device_of(address)))};
  }
};

struct Registered {
  Registered() { c10::SetAllocator(c10::kCUDA, &device_allocator, 255); }
} registered;

}  // namespace fake

namespace at {
using fake_Hooks = fake::Hooks;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", fake_Hooks)
}  // namespace at
namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, fake::Guard)
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &fake::empty);
  m.impl("empty_strided", &fake::empty_strided);
  m.impl("copy_", &fake::copy_);
  m.impl("_copy_from", &fake::copy_from);
  m.impl("_copy_from_and_resize", &fake::copy_from_and_resize);
  m.impl("resize_", &fake::resize_);
  m.impl("set_.source_Storage", &fake::set_storage);
  m.impl("set_.source_Storage_storage_offset", &fake::set_storage_offset);
  m.impl("view", &fake::view);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("unfold", &fake::unfold);
  m.impl("as_strided", &fake::as_strided);
  m.impl("_reshape_alias", &fake::reshape_alias);
  m.impl("record_stream", &fake::record_stream);
  m.impl("is_set_to", &fake::is_set_to);
  // One launch each on a device, though torch has a loop that any device can run.
  for (const char* name : {"_foreach_add_.List", "_foreach_add_.Scalar", "_foreach_mul_.Scalar", "_foreach_mul_.List", "_foreach_mul_.Tensor", "_foreach_div_.Scalar",
                           "_foreach_copy_", "_foreach_zero_", "_foreach_norm.Scalar", "_foreach_lerp_.Scalar", "_foreach_addcdiv_.Scalar",
                           "_foreach_addcmul_.Scalar", "_foreach_sqrt", "_foreach_neg_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fake::run_on_host>());
  }
  // One kernel each on a device, without memory for what is between, though torch can put them together of others.
  for (const char* name : {"silu_backward", "mish_backward", "native_layer_norm", "native_group_norm"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fake::run_on_host>());
  }
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fake::run_on_host>()); }

namespace {

using namespace fake;
using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

void resize_storage(const at::Storage& given, size_t num_bytes) {
  int device = given.device().index();
  OnDevice there(device);
  auto* storage = given.unsafeGetStorageImpl();
  auto memory = device_allocator.allocate(num_bytes);
  size_t kept = std::min(num_bytes, storage->nbytes());
  if (kept > 0) {
    Locked locked(lock_of_all());
    machine().catch_up(current_stream(device));
    device_allocator.copy_data(memory.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(num_bytes);
}

// What a collective reads, when its stream has come to it.
at::Tensor take(const at::Tensor& tensor, int stream, const std::string& what) {
  Locked locked(lock_of_all());
  machine().catch_up(stream);
  machine().issue(stream, what);
  View view(tensor);
  machine().note(stream, view, false, what);
  machine().catch_up(stream);
  Opened opened;
  return view.tensor().clone();
}

// What a collective writes, later.
void land(const at::Tensor& tensor, const at::Tensor& values, int stream, const std::string& what) {
  Locked locked(lock_of_all());
  machine().issue(stream);
  View view(tensor);
  machine().note(stream, view, true, what);
  // A copy, which no object of Python's belongs to: it may be freed by a thread that does not hold Python's lock.
  machine().perform(stream, [view, own = values.clone()] { Machine::move(view, View(own)); });
}

// What a message is received into: written from the time on when its stream comes to it, and at the latest when it is delivered.
void promise(const at::Tensor& tensor, int stream, const std::string& what) {
  Locked locked(lock_of_all());
  machine().issue(stream);
  machine().note(stream, View(tensor), true, what);
}
void deliver(const at::Tensor& tensor, const at::Tensor& values, int stream) {
  Locked locked(lock_of_all());
  machine().catch_up(stream);
  Machine::move(View(tensor), View(values));
}

// A kernel that is not an operator of torch's: called with device memory open, after what its stream waits for.
void launch(int stream, const std::string& name, const std::vector<std::tuple<uintptr_t, size_t, bool>>& ranges, const pybind11::function& run) {
  {
    Locked locked(lock_of_all());
    machine().catch_up(stream);
    machine().issue(stream, name);
    ++machine().counters.launches[name];
    for (const auto& [address, num_bytes, is_written] : ranges) {
      View view(at::empty({0}));
      view.data = reinterpret_cast<char*>(address);
      view.num_bytes = num_bytes;
      machine().note(stream, view, is_written, name);
    }
    machine().catch_up(stream);
  }
  Opened opened;
  run();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("init", [] { at::globalContext().lazyInitDevice(at::kCUDA); });
  m.def("forget_init", [] { torch::utils::set_requires_device_init(at::kCUDA, true); });
  m.def("get_device", [] { return current_device; });
  m.def("set_device", [](int device) { current_device = checked(device); });
  m.def("touch", [](int device, const std::string& what) { machine().touch(device, what); }, NoGil());
  m.def("touched", [] { return machine().touched(); }, NoGil());
  m.def("forget_touched", [] { machine().forget_touched(); }, NoGil());
  m.def("num_devices", [] { return machine().num_devices; });
  m.def("get_stream", [](int device) { return current_stream(device); });
  m.def("set_stream", [](int device, int64_t id) { current_streams.at(device) = id == 0 ? device : static_cast<int>(id); });
  m.def("device_of_stream", [](int stream) { return machine().device_of_stream(stream); });
  m.def("new_stream", &make_stream, NoGil());
  m.def("synchronize_device", &fake::synchronize_device, NoGil());
  m.def("generator", [](int device) { return generators().at(device); });
  m.def("resize_storage", &resize_storage);
  m.def("lock_pages", [](uintptr_t address, size_t num_bytes) { machine().lock_pages(reinterpret_cast<char*>(address), num_bytes, current_device); }, NoGil());
  m.def("unlock_pages", [](uintptr_t address) { machine().unlock_pages(reinterpret_cast<char*>(address)); }, NoGil());

  struct Delete {
    void operator()(Event* event) const { delete_event(event); }
  };
  pybind11::class_<Event, std::unique_ptr<Event, Delete>>(m, "Event");
  m.def(
      "record",
      [](int stream) {
        std::unique_ptr<Event, Delete> event(make_event());
        record_event(event.get(), stream);
        return event;
      },
      NoGil());
  m.def("block", [](const Event& event, int stream) { block_stream(&event, stream); }, NoGil());
  m.def("is_known_done", [](const Event& event) { return machine().is_known_done(event); }, NoGil());
  m.def("synchronize", [](const Event& event, const std::string& what) { synchronize_event(&event, what); }, NoGil());
  m.def("take", &take, NoGil());
  m.def("land", &land, NoGil());
  m.def("promise", &promise, NoGil());
  m.def("deliver", &deliver, NoGil());
  m.def("launch", &launch);

  m.def("memory", [](int device) {
    const auto& memory = machine().memory(device);
    return std::map<std::string, size_t>{{"in_use", memory.in_use}, {"peak", memory.peak}, {"allocated", memory.allocated}, {"reserved", memory.reserved},
                                         {"peak_reserved", memory.peak_reserved}, {"num_failures", memory.num_failures},
                                         {"pinned", machine().pinned_bytes()}, {"peak_pinned", machine().peak_pinned_bytes()}};
  });
  m.def("reset_peaks", [](int device) { machine().reset_peaks(device); });
  m.def("empty_cache", [] { machine().empty_cache(); });
  m.def("capacity", [](int device) { return machine().capacity(device); });
  m.def("set_capacity", [](int device, size_t num_bytes) { machine().set_capacity(device, num_bytes); });

  m.def("set_num_devices", [](int count) { machine().num_devices = count; });
  m.def("set_order", [](const std::string& order, unsigned seed) {
    machine().order = order == "early" ? Order::early : order == "random" ? Order::random : Order::late;
    machine().random.seed(seed);
  });
  m.def("set_pageable_async", [](bool value) { machine().is_pageable_async = value; });
  m.def("conflicts", [] { return machine().conflicts; });
  m.def("set_sync_debug_mode", [](int mode) { machine().sync_debug_mode = mode; });
  m.def("sync_debug_mode", [] { return machine().sync_debug_mode; });
  m.def("set_finds_conflicts", [](bool value) { machine().finds_conflicts = value; });
  m.def("clear_conflicts", [] { machine().conflicts.clear(); });
  m.def("launches", [] { return machine().counters.launches; });
  m.def("host_waits", [] { return machine().counters.host_waits; });
  m.def("copies", [] { return machine().counters.copies; });
  m.def("clear_counters", [] { machine().counters = Counters{}; });
  m.def("peek", [](const at::Tensor& tensor) { return *static_cast<volatile const char*>(tensor.storage().data()); });  // what no host may do
}
