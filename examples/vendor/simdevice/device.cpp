// A device that is memory of the host and works as late as its streams allow.
//
// An operator that is called runs later: it joins the queue of the current stream, with the addresses of its tensors, and
// its results have sizes at once and values when something reaches that place of the queue. Reached are: what a reached
// stream waits for, an event or a stream that the host waits for, and what the host reads. So code that forgets a wait meets
// memory that is not written yet (bytes 0xff: NaN) or written already by what comes after.
//
// It is C++ because the Python way (torch.utils.backend_registration) makes tensors without storage, whose streams do nothing
// (pytorch issue 195458), and FSDP frees and resizes storage. One fallback serves every operator on CPU aliases of the memory.
//
// Memory is never given back to the system: addresses in queues stay valid, as those of kernels do. Freed blocks go to the
// next tensor of the same stream, as a caching allocator's do.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <set>

namespace {

using at::IValue;
using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using Stack = torch::jit::Stack;

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 8;
constexpr int NOT_WRITTEN = 0xff;
constexpr size_t LONGEST = 20000;  // a host that runs further ahead waits, as behind a full queue of a driver
constexpr double COST = 1.0;       // virtual milliseconds that each operator, copy and collective takes

// ---- Queues ---------------------------------------------------------------------------------------------------------

struct Queue {
  std::deque<std::function<void()>> tasks;
  uint64_t given = 0, done = 0;
  bool of_default_stream = false;
  double clock = 0;  // virtual time at which what it was given is over
};

double host_clock = 0;  // the host issues work in no time, and waits until what it waits for is over
bool default_stream_late = true, other_streams_late = true;

struct Point {  // what a queue was given so far
  Queue* queue;
  uint64_t number;
  double time = 0;
};

std::recursive_mutex& lock() {
  static auto* mutex = new std::recursive_mutex;
  return *mutex;
}
using Locked = std::lock_guard<std::recursive_mutex>;

// Operators of a queue run outside of autograd and of whatever modes the thread has that happens to reach them.
struct Plain {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::default_included_set,
      c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
          DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher})};
};

void reach(const Point& point) {
  Locked locked(lock());
  while (point.queue->done < point.number) {
    auto task = std::move(point.queue->tasks.front());
    point.queue->tasks.pop_front();
    point.queue->done++;
    task();
  }
}

// As torch.cuda.set_sync_debug_mode("error"): code that is to run ahead of the device finds out where it does not.
bool waits_are_errors = false;

void host_waits_for(const Point& point, const char* why) {
  TORCH_CHECK(!waits_are_errors, "the host waits for the device: ", why);
  reach(point);
  host_clock = std::max(host_clock, point.time);
}

Point end_of(Queue& queue) {
  Locked locked(lock());
  // Of a stream that is idle nothing ends before the host asks.
  return {&queue, queue.given, std::max(queue.clock, host_clock)};
}

void give(Queue& queue, std::function<void()> task, double cost = COST) {
  Locked locked(lock());
  queue.clock = std::max(queue.clock, host_clock) + cost;
  queue.tasks.push_back(std::move(task));
  queue.given++;
  if (!(queue.of_default_stream ? default_stream_late : other_streams_late)) reach({&queue, queue.given});
  if (queue.tasks.size() > LONGEST) reach({&queue, queue.given - LONGEST / 2});
}

void wait_for(Queue& queue, const Point& point) {
  if (&queue == point.queue) return;
  Locked locked(lock());
  give(queue, [point] { reach(point); }, 0);
  queue.clock = std::max(queue.clock, point.time);
}

Queue& queue_of(const c10::Stream& stream) {
  static auto* queues = new std::map<std::pair<DeviceIndex, c10::StreamId>, Queue>;
  Locked locked(lock());
  auto [entry, is_new] = queues->try_emplace({stream.device_index(), stream.id()});
  if (is_new) entry->second.of_default_stream = stream.id() == 0;
  return entry->second;
}

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[DEVICES] = {};
std::atomic<c10::StreamId> streams_made{0};

c10::Stream stream_of(DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, Device(TYPE, device), id);
}
DeviceIndex index_of(const Device& device) { return device.has_index() ? device.index() : current_device; }
Queue& current_queue(DeviceIndex device) { return queue_of(stream_of(device, current_stream[device])); }

c10::Stream stream_of_group(const void* group, DeviceIndex device) {  // a group's collectives run on a stream of its own
  static auto* streams = new std::map<std::pair<const void*, DeviceIndex>, c10::StreamId>;
  Locked locked(lock());
  auto [entry, is_new] = streams->try_emplace({group, device}, 0);
  if (is_new) entry->second = ++streams_made;
  return stream_of(device, entry->second);
}

DeviceIndex checked(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < DEVICES, "there are ", DEVICES, " devices, got index ", int(device));
  return device;
}

struct On {  // allocations and streams of a device while it lasts
  explicit On(DeviceIndex device) : before(current_device) { current_device = checked(device); }
  ~On() { current_device = before; }
  DeviceIndex before;
};

void reach_everything(DeviceIndex device) {
  Locked locked(lock());
  for (c10::StreamId id = 0; id <= streams_made; id++) {
    Point end = end_of(queue_of(stream_of(device, id)));
    reach(end);
    host_clock = std::max(host_clock, end.time);
  }
}

struct Event {
  Point point;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  c10::DeviceType type() const override { return TYPE; }
  Device getDevice() const override { return Device(TYPE, current_device); }
  void setDevice(Device device) const override { current_device = checked(index_of(device)); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Stream getStream(Device device) const override {
    return stream_of(index_of(device), current_stream[index_of(device)]);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getNewStream(Device device, int) const override { return stream_of(index_of(device), ++streams_made); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->point = end_of(queue_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait_for(queue_of(stream), static_cast<Event*>(event)->point);
  }
  // Time passes while somebody asks: what is asked for is over when the answer comes.
  bool queryEvent(void* event) const override { return synchronizeEvent(event), true; }
  bool queryStream(const c10::Stream& stream) const override { return synchronizeStream(stream), true; }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    reach(static_cast<Event*>(event)->point);
    host_clock = std::max(host_clock, static_cast<Event*>(event)->point.time);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits_for(end_of(queue_of(stream)), "a stream is synchronized");
  }
  void synchronizeDevice(const DeviceIndex device) const override { reach_everything(device); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    return static_cast<Event*>(end)->point.time - static_cast<Event*>(begin)->point.time;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override;
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---- Memory ---------------------------------------------------------------------------------------------------------

struct Block {
  void* data;
  size_t size;
  DeviceIndex device;
  Queue* queue;             // of the stream that it was allocated on
  std::set<Queue*> users;  // other streams, by record_stream
};

struct Memory {
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> free;
  std::vector<std::pair<Block*, std::vector<Point>>> in_use;  // freed by the host, not by recorded streams
  int64_t live[DEVICES] = {}, peak[DEVICES] = {};
};
Memory& memory() {
  static auto* all = new Memory;
  return *all;
}

void park(Block* block) { memory().free[{block->queue, block->size}].push_back(block); }

void park_what_streams_left() {
  auto& waiting = memory().in_use;
  for (size_t i = 0; i < waiting.size();) {
    bool over = true;
    for (auto& point : waiting[i].second) over &= point.queue->done >= point.number;
    if (!over) { i++; continue; }
    park(waiting[i].first);
    waiting.erase(waiting.begin() + i);
  }
}

void take_back(Block* block) {
  memory().live[block->device] -= block->size;
  std::vector<Point> points;
  for (auto* queue : block->users) points.push_back({queue, queue->given});
  block->users.clear();
  if (points.empty()) park(block);
  else memory().in_use.emplace_back(block, std::move(points));
}

struct Released {  // blocks that nothing holds any more, until somebody who has the lock takes them back
  std::mutex mutex;
  std::vector<Block*> blocks;
};
Released& released() {
  static auto* released = new Released;
  return *released;
}

void take_back_released() {
  std::vector<Block*> blocks;
  {
    std::lock_guard<std::mutex> guard(released().mutex);
    blocks.swap(released().blocks);
  }
  for (auto* block : blocks) take_back(block);
}

// Never waits for the lock: a thread that frees may have Python's, and the work for which a thread keeps ours may need that one.
void release(void* context) {
  if (context == nullptr) return;
  {
    std::lock_guard<std::mutex> guard(released().mutex);
    released().blocks.push_back(static_cast<Block*>(context));
  }
  std::unique_lock<std::recursive_mutex> tried(lock(), std::try_to_lock);
  if (tried) take_back_released();
}

void* fresh(size_t size) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, 64, size) == 0, "the host has no ", size, " bytes left for the simulated device");
  return std::memset(data, NOT_WRITTEN, size);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device device(TYPE, current_device);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    Locked locked(lock());
    take_back_released();
    park_what_streams_left();
    size_t size = (bytes + 511) / 512 * 512;
    auto* queue = &current_queue(current_device);
    auto& parked = memory().free[{queue, size}];
    Block* block;
    if (parked.empty()) {
      block = new Block{fresh(size), size, current_device, queue, {}};
    } else {
      block = parked.back();
      parked.pop_back();
    }
    auto& live = memory().live[current_device];
    live += size;
    memory().peak[current_device] = std::max(memory().peak[current_device], live);
    return {block->data, block, &release, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Allocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

void used_on(const c10::DataPtr& data, const c10::Stream& stream) {
  if (data.get_deleter() != &release || data.get_context() == nullptr) return;
  Locked locked(lock());
  auto* block = static_cast<Block*>(data.get_context());
  auto* queue = &queue_of(stream);
  if (queue != block->queue) block->users.insert(queue);
}
void Guard::recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const { used_on(data, stream); }

std::map<const char*, size_t>& pinned() {
  static auto* blocks = new std::map<const char*, size_t>;
  return *blocks;
}
void unpin(void* data) {
  Locked locked(lock());
  pinned().erase(static_cast<char*>(data));
  std::free(data);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Device host(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &unpin, host};
    Locked locked(lock());
    void* data = fresh(bytes);
    pinned()[static_cast<char*>(data)] = bytes;
    return {data, data, &unpin, host};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  Locked locked(lock());
  auto* place = static_cast<const char*>(data);
  auto after = pinned().upper_bound(place);
  return after != pinned().begin() && place < std::prev(after)->first + std::prev(after)->second;
}

// ---- Tensors --------------------------------------------------------------------------------------------------------

bool ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

// The same memory as a tensor of the host. It owns nothing: what it is read for may come long after the tensor is gone.
Tensor host(const Tensor& tensor, bool touched = true) {
  if (!ours(tensor)) return tensor;
  size_t last = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.element_size(), tensor.storage_offset());
  TORCH_CHECK(!touched || tensor.numel() == 0 || last <= tensor.storage().nbytes(), "a tensor of ", tensor.sizes(),
              " is used whose memory was freed (", tensor.storage().nbytes(), " bytes are left of ", last, ")");
  auto* data = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  if (data != nullptr) data += tensor.storage_offset() * tensor.element_size();
  return at::from_blob(data, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
}

Tensor empty_strided(DeviceIndex device, c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  On on(device);
  return at::detail::empty_strided_generic(sizes, strides, &allocator, DispatchKeySet(DispatchKey::PrivateUse1), dtype);
}

Tensor empty_like(DeviceIndex device, const Tensor& other) {
  return empty_strided(device, other.sizes(), other.strides(), other.scalar_type());
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto* impl = storage.unsafeGetStorageImpl();
  On on(storage.device().index());
  auto data = allocator.allocate(bytes);
  if (size_t kept = std::min(bytes, storage.nbytes())) {
    give(current_queue(current_device),
         [to = data.get(), from = storage.data(), kept] { std::memcpy(to, from, kept); });
  }
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& tensor, c10::IntArrayRef sizes) {
  size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, tensor.element_size(), tensor.storage_offset());
  if (tensor.storage().nbytes() < bytes) resize_storage(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

Tensor view_of(const Tensor& tensor, const Tensor& shape, int64_t offset) {  // offset in elements of the view
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), shape.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides(), offset);
  return view;
}

template <typename F>
IValue changed(const IValue& value, const F& change) {  // every tensor of an argument, however deep
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
    auto from = value.toList();
    c10::impl::GenericList list(from.elementType());
    for (const IValue& element : from) list.push_back(changed(element, change));
    return list;
  }
  if (value.isDevice() && value.toDevice().type() == TYPE) return Device(c10::DeviceType::CPU);
  return value;
}

// ---- Operators ------------------------------------------------------------------------------------------------------

bool takes_host_tensors(const std::string& name) {
  static const char* names[] = {"aten::index", "aten::_index", "aten::_foreach_", "aten::_pack_padded", "aten::ctc_loss",
                                "aten::_ctc_loss"};
  return std::any_of(std::begin(names), std::end(names), [&](const char* start) { return name.rfind(start, 0) == 0; });
}

DeviceIndex device_of(const c10::OperatorHandle& op, const std::vector<IValue>& args) {
  DeviceIndex device = -1;
  const auto& name = op.schema().name();
  auto meet = [&](const Tensor& tensor) {
    if (ours(tensor)) {
      TORCH_CHECK(device < 0 || device == tensor.device().index(), "Expected all tensors to be on the same device, but ",
                  name, " got some on device ", int(device), " and some on device ", int(tensor.device().index()));
      device = tensor.device().index();
    } else {
      TORCH_CHECK(!tensor.defined() || tensor.dim() == 0 || takes_host_tensors(name),
                  "Expected all tensors to be on the same device, but ", name, " got some on ", tensor.device(),
                  " beside those of this device");
    }
    return tensor;
  };
  for (const auto& arg : args) {
    if (arg.isDevice() && arg.toDevice().type() == TYPE && device < 0) device = index_of(arg.toDevice());
  }
  for (const auto& arg : args) changed(arg, meet);
  return device < 0 ? current_device : device;
}

bool written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }
bool is_out(const c10::Argument& argument) { return written(argument) && argument.kwarg_only(); }

const IValue* aliased(const c10::FunctionSchema& schema, size_t result, const std::vector<IValue>& args) {
  const auto* alias = schema.returns()[result].alias_info();
  if (alias == nullptr) return nullptr;
  for (size_t i = 0; i < args.size(); i++) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && *other == *alias) return &args[i];
  }
  return nullptr;
}

void resize_outs(const c10::FunctionSchema& schema, const std::vector<IValue>& args, const std::vector<IValue>& like) {
  for (size_t i = 0; i < args.size(); i++) {
    if (!is_out(schema.arguments()[i]) || !args[i].isTensor() || !ours(args[i].toTensor())) continue;
    auto sizes = like[i].toTensor().sizes();
    if (args[i].toTensor().sizes() != sizes) resize_(args[i].toTensor(), sizes);
  }
}

std::vector<IValue> call(const c10::OperatorHandle& op, const std::vector<IValue>& args, DispatchKey key) {
  Plain plain;
  Stack stack(args.begin(), args.end());
  try {
    op.redispatchBoxed(DispatchKeySet(key), &stack);
  } catch (c10::Error& error) {  // it may be met long after the call, by whoever reaches that place of the queue
    error.add_context("in " + op.schema().name() + " of the simulated device");
    throw;
  }
  return {stack.begin(), stack.end()};
}

Tensor as_meta(const Tensor& tensor) {
  if (!tensor.defined() || (!ours(tensor) && tensor.dim() == 0)) return tensor;  // numbers decide about dtypes
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

// The host reads small tensors of its own when it calls, not when the device comes to it.
Tensor snapshot(const Tensor& tensor) {
  if (ours(tensor) || !tensor.defined()) return host(tensor);
  Plain plain;
  Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

void copy_into(const IValue& target, const IValue& value) {  // targets are tensors of the host over device memory
  if (value.isTensor() && target.isTensor() && target.toTensor().defined()) {
    // Batch norm in evaluation leaves statistics empty on the host, of which its Meta kernel says sizes.
    if (value.toTensor().numel() > 0) target.toTensor().copy_(value.toTensor());
  } else if (value.isTensorList()) {
    auto to = target.toTensorVector(), from = value.toTensorVector();
    for (size_t i = 0; i < from.size(); i++) if (to[i].defined()) to[i].copy_(from[i]);
  }
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

// Values that sizes depend on, and random numbers: those are drawn in the order of the calls, as on the host.
bool runs_at_once(const c10::OperatorHandle& op, const std::vector<IValue>& args) {
  const auto& name = op.schema().name();
  bool statistics = name == "aten::native_layer_norm" || name == "aten::native_group_norm";
  // In low precision the Meta kernel says another dtype of the statistics than the host's kernels have and want.
  if (statistics && c10::isReducedFloatingType(args[0].toTensor().scalar_type())) return true;
  for (const auto& result : op.schema().returns()) {
    auto kind = result.type()->kind();
    if (kind != c10::TypeKind::TensorType && kind != c10::TypeKind::ListType) return true;
  }
  return op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape) ||
      op.hasTag(at::Tag::nondeterministic_seeded);
}

// Sizes of the results from the operator's Meta kernel; false where it has none or refuses.
bool infer(const c10::OperatorHandle& op, DeviceIndex device, const std::vector<IValue>& args, std::vector<IValue>& results) {
  const auto& schema = op.schema();
  bool known = true;
  for (size_t i = 0; i < schema.returns().size(); i++) known &= aliased(schema, i, args) != nullptr;
  for (const auto& argument : schema.arguments()) known &= !is_out(argument);
  std::vector<IValue> metas, shapes(schema.returns().size());
  if (!known) {
    for (const auto& arg : args) {
      metas.push_back(arg.isDevice() ? IValue(Device(c10::DeviceType::Meta)) : changed(arg, as_meta));
    }
    try {
      shapes = call(op, metas, DispatchKey::Meta);
    } catch (const std::exception&) {
      return false;  // then the operator runs at once, and tells what is wrong
    }
    resize_outs(schema, args, metas);
  }
  for (size_t i = 0; i < shapes.size(); i++) {
    const auto* alias = aliased(schema, i, args);
    results.push_back(alias ? *alias : changed(shapes[i], [&](const Tensor& shape) {
      return shape.defined() ? empty_like(device, shape) : shape;
    }));
  }
  return true;
}

std::vector<IValue> run_now(const c10::OperatorHandle& op, DeviceIndex device, const std::vector<IValue>& args) {
  const auto& schema = op.schema();
  auto& queue = current_queue(device);
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) {
    host_waits_for(end_of(queue), schema.name().c_str());
  }
  reach(end_of(queue));
  std::vector<IValue> inputs;
  for (size_t i = 0; i < args.size(); i++) {
    bool out = is_out(schema.arguments()[i]) && args[i].isTensor() && ours(args[i].toTensor());
    inputs.push_back(out ? IValue(Tensor(at::detail::empty_cpu({0}, args[i].toTensor().scalar_type())))
                         : changed(args[i], [](const Tensor& tensor) { return host(tensor); }));
  }
  auto values = call(op, inputs, DispatchKey::CPU);
  resize_outs(schema, args, inputs);
  std::vector<IValue> results;
  for (size_t i = 0; i < values.size(); i++) {
    const auto* alias = aliased(schema, i, args);
    auto made = [&](const Tensor& value) { return value.defined() ? empty_like(device, value) : value; };
    bool tensors = values[i].isTensor() || values[i].isTensorList();
    results.push_back(alias ? *alias : tensors ? changed(values[i], made) : values[i]);
    auto target = changed(results[i], [](const Tensor& tensor) { return host(tensor); });
    bool fresh_out = alias && alias->isTensor() && values[i].isTensor() &&
        values[i].toTensor().const_data_ptr() != target.toTensor().const_data_ptr();
    if (tensors && (!alias || fresh_out)) {
      give(queue, [target, value = values[i]] { Plain plain; copy_into(target, value); });
    }
  }
  reach(end_of(queue));
  return results;
}

std::vector<IValue> views(const c10::OperatorHandle& op, const std::vector<IValue>& args) {
  std::vector<IValue> inputs;
  for (const auto& arg : args) inputs.push_back(changed(arg, [](const Tensor& tensor) { return host(tensor, false); }));
  auto results = call(op, inputs, DispatchKey::CPU);
  const Tensor& base = args.at(0).toTensor();
  for (auto& result : results) {
    result = changed(result, [&](const Tensor& shape) {
      int64_t before = base.storage_offset() * int64_t(base.element_size()) / int64_t(shape.element_size());
      return view_of(base, shape, before + shape.storage_offset());
    });
  }
  return results;
}

void fallback(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  auto args = torch::jit::pop(*stack, op.schema().arguments().size());
  DeviceIndex device = device_of(op, args);
  On on(device);
  std::vector<IValue> results;
  if (is_view(op.schema())) {
    results = views(op, args);
  } else if (runs_at_once(op, args) || !infer(op, device, args, results)) {
    results = run_now(op, device, args);
  } else {
    std::vector<IValue> inputs, targets(results.size());
    for (const auto& arg : args) inputs.push_back(changed(arg, snapshot));
    for (size_t i = 0; i < results.size(); i++) {
      if (!aliased(op.schema(), i, args)) targets[i] = changed(results[i], [](const Tensor& t) { return host(t); });
    }
    give(current_queue(device), [op, inputs, targets] {
      auto values = call(op, inputs, DispatchKey::CPU);
      Plain plain;
      for (size_t i = 0; i < targets.size(); i++) if (!targets[i].isNone()) copy_into(targets[i], values[i]);
    });
  }
  for (auto& result : results) stack->push_back(std::move(result));
}


// ---- Kernels of its own: memory, metadata, copies --------------------------------------------------------------------

Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On on(device ? index_of(*device) : current_device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &allocator, DispatchKeySet(DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_with_strides(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                          std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return empty_strided(device ? index_of(*device) : current_device, C10_AS_INTARRAYREF_SLOW(sizes),
                       C10_AS_INTARRAYREF_SLOW(strides), c10::dtype_or_default(dtype));
}

Tensor on_host(const Tensor& tensor) {  // host memory that stays while a queue names it
  if (ours(tensor)) return host(tensor);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [storage = tensor.storage()](void*) {},
                       at::TensorOptions().dtype(tensor.dtype()));
}

// As cudaMemcpyAsync: late between devices, and to and from pinned memory where the caller does not want to wait.
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  DeviceIndex device = ours(from) ? from.device().index() : to.device().index();
  auto& queue = current_queue(device);
  bool late = ours(from) && ours(to);
  if (!late && non_blocking) late = is_pinned((ours(from) ? to : from).data_ptr());
  if (ours(from) && ours(to)) wait_for(queue, end_of(current_queue(to.device().index())));
  give(queue, [source = on_host(from), target = on_host(to)] { Plain plain; target.copy_(source); });
  if (!late) host_waits_for(end_of(queue), "a copy to or from it blocks");
  if (ours(from) && ours(to)) wait_for(current_queue(to.device().index()), end_of(queue));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  host_waits_for(end_of(current_queue(tensor.device().index())), "a value is read");
  return host(tensor).item();
}

const Tensor& resize_kernel(const Tensor& tensor, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  return resize_(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}

Tensor as_strided(const Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides,
                  std::optional<c10::SymInt> offset) {
  Tensor shape = at::detail::empty_strided_meta(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                                tensor.scalar_type());
  return view_of(tensor, shape, offset ? offset->guard_int(__FILE__, __LINE__) : tensor.storage_offset());
}
Tensor view(const Tensor& tensor, c10::SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}
Tensor reshape_alias(const Tensor& tensor, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

Tensor& set_strided(Tensor& tensor, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes,
                    c10::SymIntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                              offset.guard_int(__FILE__, __LINE__));
  return tensor;
}
Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  auto* impl = tensor.unsafeGetTensorImpl();
  int64_t count = storage.nbytes() / tensor.element_size();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({count});
  return tensor;
}
Tensor& set_tensor(Tensor& tensor, const Tensor& from) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(from.storage());
  impl->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  return tensor;
}
Tensor& set_nothing(Tensor& tensor) {
  return set_tensor(tensor, empty_strided(tensor.device().index(), {0}, {1}, tensor.scalar_type()));
}

// Torch knows of its own devices that `parameter.data = parameter.to(device)` keeps the parameter; FSDP moves models so.
bool same_kind_of_tensor(const Tensor& tensor, const Tensor& from) {
  auto dense = [](const Tensor& t) { return t.layout() == at::kStrided && (ours(t) || t.is_cpu()); };
  return dense(tensor) && dense(from);
}

// Convolutions of a device that is not torch's own come here: they are those of the host.
Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, c10::SymIntArrayRef stride,
                   c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                   c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  reach(end_of(current_queue(input.device().index())));
  Plain plain;
  auto value = at::convolution_symint(host(input), host(weight), bias ? host(*bias) : Tensor(), stride, padding, dilation,
                                      transposed, output_padding, groups);
  Tensor result = empty_like(input.device().index(), value);
  host(result).copy_(value);
  return result;
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding, c10::SymInt groups,
    std::array<bool, 3> mask) {
  reach(end_of(current_queue(input.device().index())));
  Plain plain;
  std::vector<c10::SymInt> channels{grad.sym_size(1)};
  auto values = at::convolution_backward_symint(host(grad), host(input), host(weight), c10::SymIntArrayRef(channels), stride,
                                                padding, dilation, transposed, output_padding, groups, mask);
  auto made = [&](const Tensor& value) {
    if (!value.defined()) return Tensor();
    Tensor result = empty_like(input.device().index(), value);
    host(result).copy_(value);
    return result;
  };
  return {made(std::get<0>(values)), made(std::get<1>(values)), made(std::get<2>(values))};
}

void record_stream(Tensor& tensor, c10::Stream stream) { used_on(tensor.storage().data_ptr(), stream); }

// ---- Collectives ----------------------------------------------------------------------------------------------------

// A collective takes its inputs when it is called (after what the current stream was given) and hands copies to the group's
// backend for the host, so that ranks meet in the order of their calls and never wait in a circle. Its results come late.
struct LateWork final : c10d::Work {
  LateWork(Point end, DeviceIndex device, c10::Stream stream, std::vector<Tensor> results, bool host_waits)
      : end(end), device(device), stream(stream), results(std::move(results)), host_waits(host_waits) {}
  bool isCompleted() override { return reach(end), true; }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    wait_for(current_queue(device), end);
    if (host_waits) reach(end);
  }
  bool wait(std::chrono::milliseconds) override { return synchronize(), true; }
  std::vector<Tensor> result() override { return results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto type = c10::ListType::create(c10::TensorType::get());
    auto future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<Device>{Device(TYPE, device)});
    Guard guard;
    auto before = guard.exchangeStream(stream);
    future->markCompleted(IValue(results));
    guard.exchangeStream(before);
    return future;
  }
  Point end;
  DeviceIndex device;
  c10::Stream stream;
  std::vector<Tensor> results;
  bool host_waits;
};

struct Staged {  // a tensor of a collective: its memory, what the backend works on, what it was
  Tensor device, copy, before;
  c10::Storage kept;
};

bool same_bytes(const Tensor& a, const Tensor& b) {
  return std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.storage().nbytes()) == 0;
}

void land(const std::vector<Staged>& inputs, const std::vector<Staged>& outputs, c10d::Work& work) {
  work.wait();
  Plain plain;
  bool overwritten = false;  // while the collective may still have read it
  for (const auto& input : inputs) overwritten |= !same_bytes(input.device.clone(), input.before);
  for (const auto& output : outputs) {
    if (overwritten) std::memset(output.copy.storage().mutable_data(), NOT_WRITTEN, output.copy.storage().nbytes());
    output.device.copy_(output.copy);
  }
}

void collective(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const std::string name = op.schema().name();
  auto args = torch::jit::pop(*stack, op.schema().arguments().size());
  DeviceIndex device = -1;
  for (const auto& arg : args) {
    changed(arg, [&](const Tensor& tensor) {
      if (ours(tensor)) device = tensor.device().index();
      return tensor;
    });
  }
  auto& queue = current_queue(device);
  reach(end_of(queue));
  bool sends_only = name == "c10d::send" || name == "c10d::barrier", in_place = args.size() > 1 && args[1].isObject();
  std::vector<Staged> inputs, outputs;
  std::vector<Tensor> results;
  std::vector<IValue> staged;
  const void* group = nullptr;
  size_t position = 0;
  for (const auto& arg : args) {
    bool output = position == 0 && !sends_only, input = position > 0 || sends_only || in_place;
    if (arg.isObject() && group == nullptr) group = arg.toObject().get()->getSlot(0).toCapsule().get();
    staged.push_back(changed(arg, [&](const Tensor& tensor) {
      if (!ours(tensor)) return tensor;
      Plain plain;
      Staged part{host(tensor), host(tensor).clone(), {}, tensor.storage()};
      if (input) part.before = part.copy.clone();
      if (input) inputs.push_back(part);
      if (output) outputs.push_back(part), results.push_back(tensor);
      return part.copy;
    }));
    position++;
  }
  auto values = call(op, staged, DispatchKey::CPU);
  if (values.empty()) return;  // monitored_barrier_
  auto work = values.back().toCustomClass<c10d::Work>();
  auto stream = stream_of_group(group, device);
  give(queue_of(stream), [inputs, outputs, work] { land(inputs, outputs, *work); });
  auto late = c10::make_intrusive<LateWork>(end_of(queue_of(stream)), device, stream, results, name == "c10d::barrier");
  if (values.size() > 1) stack->push_back(args[0]);
  stack->push_back(IValue(c10::intrusive_ptr<c10d::Work>(std::move(late))));
}

// ---- Registration ---------------------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = checked(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex before = current_device;
    setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// Replaces what torch registers for every device: that asks the group's backend for the device's own memory.
void register_collectives() {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static auto* library = new torch::Library(torch::Library::IMPL, "c10d", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_",
        "broadcast_", "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_",
        "barrier", "monitored_barrier_"}) {
    library->impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
  }
}

void set_late(bool default_late, bool others_late) {
  default_stream_late = default_late;
  other_streams_late = others_late;
}

void start() {
  if (at::isPrivateUse1HooksRegistered()) return;
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  register_collectives();
}

int64_t live_bytes(int64_t device, bool peak) {
  Locked locked(lock());
  take_back_released();
  return (peak ? memory().peak : memory().live)[device];
}
void make_waits_errors(bool errors) { waits_are_errors = errors; }
void forget_peak(int64_t device) { memory().peak[device] = live_bytes(device, false); }
}  // namespace

void end_backward_threads() { torch::autograd::Engine::get_default_engine().stop(); }

TORCH_LIBRARY(simdevice, library) {
  library.def("start() -> ()", &start);
  library.def("end_backward_threads() -> ()", &end_backward_threads);
  library.def("set_late(bool default_late, bool others_late) -> ()", &set_late);
  library.def("live_bytes(int device, bool peak) -> int", &live_bytes);
  library.def("make_waits_errors(bool errors) -> ()", &make_waits_errors);
  library.def("forget_peak(int device) -> ()", &forget_peak);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_with_strides);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("resize_", &resize_kernel);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("set_", &set_nothing);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Storage_storage_offset", &set_strided);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  // Torch has made-up ones for any device, whose statistics have another dtype than those of the host's backward.
  for (const char* name : {"native_layer_norm", "native_group_norm"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  library.impl("record_stream", &record_stream);
  library.impl("_has_compatible_shallow_copy_type", &same_kind_of_tensor);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Autocast: the lists that torch keeps for accelerators. An operator of none runs in the dtypes that it is given.
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_UNLESS_ASKED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // torch's macros say `m`, and name no namespace
  using namespace at;
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_UNLESS_ASKED)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
  m.impl("binary_cross_entropy", [](const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) -> Tensor {
    TORCH_CHECK(false, "autocast refuses binary_cross_entropy, as on CUDA: use binary_cross_entropy_with_logits");
  });
}
