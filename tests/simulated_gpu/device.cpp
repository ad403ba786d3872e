// A CUDA device for tests on machines without one: torch tensors on cuda:0 whose memory is the host's, computed with by
// torch's CPU kernels; and streams that put off whatever a GPU may put off. docs/design/simulated-gpu.md says what it
// can show. Loaded with torch.ops.load_library before the first backward pass, and spoken to with ctypes.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <unordered_set>

namespace {

using at::Tensor;
using Ticket = uint64_t;
using StreamId = int64_t;

const c10::Device kDevice(c10::DeviceType::CUDA, 0);
// What a context takes for itself.
constexpr size_t kReserved = size_t(1) << 20;
// NaN as a float, negative as an integer.
constexpr int kPoison = 0xFF;

// When streams go on: at once; when something needs them; at random moments; or late, but for what torch computes,
// which is there at once, so that memory is reused as early as can be.
enum Policy { kEager = 0, kLate = 1, kRandom = 2, kAhead = 3 };

// ---- streams: queues of work, each piece with the number at which the stream is done with it
// ---------------------------------

struct Item {
    std::function<void()> run;    // what to do, or
    StreamId awaited = -1;        // the stream to wait for
    Ticket ticket = 0;            // until it has done so much
    std::vector<const void*> of;  // host memory that it touches
    bool busy = false;            // takes long: is not done before somebody waits for it
};

struct Stream {
    std::deque<Item> items;
    Ticket queued = 0, done = 0;
    Ticket known = 0;                   // what the host has waited for
    std::map<StreamId, Ticket> waited;  // what of other streams comes before what is queued next
};

struct Block {
    size_t nbytes;
    StreamId stream;
    std::set<StreamId> used_by;          // as record_stream says
    std::map<StreamId, Ticket> read_by;  // other streams on which torch computed with it, and until when
};

struct Freed {
    size_t nbytes;
    bool poisoned = false;
    std::vector<std::pair<StreamId, Ticket>> until;  // what the streams that were recorded have yet to do
};

struct State {
    std::recursive_mutex mutex;
    std::map<StreamId, Stream> streams;
    std::map<char*, Block> blocks;       // device memory in use
    std::map<char*, size_t> registered;  // host memory that the GPU reaches
    std::map<char*, size_t> pinned;      // of it, torch's own
    std::map<char*, Freed> freed;        // device memory that queued work may still touch
    std::vector<char*> freed_pinned;
    std::atomic<int64_t> pending{0};
    std::atomic<int> policy{kLate};
    std::mt19937_64 random{0};
    StreamId next_stream = 0x51000;
    size_t capacity = size_t(4) << 30, allocated = 0, peak = 0, total = 0;
    int64_t allocations = 0;
    std::string fault;
    std::atomic<bool> faulty{false};
};

State& state() {
    static State* const made = new State;  // outlives every tensor
    return *made;
}

using Lock = std::lock_guard<std::recursive_mutex>;

thread_local StreamId current_stream = 0;

int (*round_trip_callback)(const char*) = nullptr;

// The host waits for the device. The callback says whether that is allowed.
void note_round_trip(const std::string& what) {
    if (round_trip_callback)
        TORCH_CHECK(round_trip_callback(what.c_str()), "called a synchronizing CUDA operation (", what, ")");
}

void fail(const std::string& what) {
    if (state().fault.empty()) state().fault = what;
    state().faulty = true;
}

void poison(char* memory, Freed& freed) {
    std::memset(memory, kPoison, freed.nbytes);
    freed.poisoned = true;
}

bool still_poisoned(const char* memory, size_t nbytes) {
    return nbytes == 0 || ((unsigned char)memory[0] == kPoison && std::memcmp(memory, memory + 1, nbytes - 1) == 0);
}

// Memory goes back to the host once no queued work can touch it any more.
void release_freed() {
    State& all = state();
    for (auto next = all.freed.begin(); next != all.freed.end();) {
        auto& [memory, freed] = *next;
        if (!freed.poisoned && !freed.until.empty()) {
            bool over = true;
            for (const auto& [stream, ticket] : freed.until)
                over = over && all.streams[stream].done >= ticket;
            if (over) poison(memory, freed);
        }
        if (all.pending == 0 && freed.poisoned) {
            if (!still_poisoned(memory, freed.nbytes))
                fail(
                    "work that was queued on a stream wrote to device memory after it was freed: a tensor made on "
                    "another stream needs record_stream");
            std::free(memory);
            next = all.freed.erase(next);
        } else {
            ++next;
        }
    }
    if (all.pending == 0) {
        for (char* memory : all.freed_pinned)
            std::free(memory);
        all.freed_pinned.clear();
    }
}

void run_to(StreamId id, Ticket ticket);

void run_first(Stream& stream) {
    Item item = std::move(stream.items.front());
    stream.items.pop_front();
    if (!item.run) run_to(item.awaited, item.ticket);
    try {
        if (item.run) item.run();
    } catch (const std::exception& error) {
        fail(error.what());
    }
    ++stream.done;
    --state().pending;
}

void run_to(StreamId id, Ticket ticket) {
    Stream& stream = state().streams[id];
    while (stream.done < ticket && !stream.items.empty())
        run_first(stream);
}

bool blocked(const Stream& stream) {
    const Item& first = stream.items.front();
    return first.busy || (!first.run && state().streams[first.awaited].done < first.ticket);
}

// Run what the stream can without making another one move.
void run_alone(Stream& stream) {
    while (!stream.items.empty() && !blocked(stream))
        run_first(stream);
}

// A moment at which a GPU may have gone on by itself.
void drift() {
    State& all = state();
    if (all.policy != kRandom || all.pending == 0) return;
    if (all.random() % 4) return;
    for (int turn = 1 + all.random() % 3; turn > 0; --turn) {
        std::vector<Stream*> able;
        for (auto& [id, stream] : all.streams)
            if (!stream.items.empty() && !blocked(stream)) able.push_back(&stream);
        if (able.empty()) return;
        run_first(*able[all.random() % able.size()]);
    }
}

void queue(StreamId id, Item item) {
    State& all = state();
    Stream& stream = all.streams[id];
    stream.items.push_back(std::move(item));
    ++stream.queued;
    ++all.pending;
    if (all.policy == kEager) run_to(id, stream.queued);
    drift();
}

void queue(StreamId id, std::function<void()> run, std::vector<const void*> of = {}) {
    queue(id, Item{std::move(run), -1, 0, std::move(of), false});
}

void raise_fault() {
    std::string fault;
    fault.swap(state().fault);
    state().faulty = false;
    TORCH_CHECK(fault.empty(), "CUDA error (simulated): ", fault);
}

// What the current stream has queued, and all that waits for, is done.
void drain() {
    State& all = state();
    if (all.pending == 0 && !all.faulty) return;
    Lock lock(all.mutex);
    drift();
    run_to(current_stream, all.streams[current_stream].queued);
    release_freed();
    raise_fault();
}

bool adversarial() {
    State& all = state();
    if (all.policy == kEager || all.policy == kAhead) return false;
    if (all.policy == kLate) return true;
    Lock lock(all.mutex);
    return all.random() % 2;
}

// ---- memory
// -----------------------------------------------------------------------------------------------------------

// The block or registered range that holds an address.
template <typename Ranges, typename Size>
bool inside(const Ranges& ranges, const void* pointer, Size size) {
    auto after = ranges.upper_bound((char*)pointer);
    if (after == ranges.begin()) return false;
    --after;
    return (char*)pointer < after->first + size(after->second);
}

bool is_device(const void* pointer) {
    // What was freed is the device's as long as its own stream has not come to that.
    auto freed = state().freed.upper_bound((char*)pointer);
    if (freed != state().freed.begin()) {
        --freed;
        if (!freed->second.poisoned && (char*)pointer < freed->first + freed->second.nbytes) return true;
    }
    return inside(state().blocks, pointer, [](const Block& block) { return block.nbytes; });
}

bool is_pinned(const void* pointer) {
    return inside(state().registered, pointer, [](size_t nbytes) { return nbytes; });
}

void free_device(void* pointer) {
    State& all = state();
    Lock lock(all.mutex);
    const auto found = all.blocks.find((char*)pointer);
    if (found == all.blocks.end()) return;
    const Block block = found->second;
    all.blocks.erase(found);
    all.allocated -= block.nbytes;
    Stream& own = all.streams[block.stream];
    Freed& freed = all.freed[(char*)pointer];
    freed = {block.nbytes, false, {}};
    for (const auto& [stream, ticket] : block.read_by)
        if (!block.used_by.count(stream) && all.streams[stream].known < ticket && own.waited[stream] < ticket)
            fail(
                "device memory was freed while a stream that it was not made on may compute with it: it needs "
                "record_stream");
    for (StreamId stream : block.used_by)
        freed.until.emplace_back(stream, all.streams[stream].queued);
    if (all.policy == kAhead || (all.policy == kRandom && all.random() % 2)) run_alone(own);
    if (!freed.until.empty())
        freed.until.emplace_back(block.stream, own.queued);
    else if (own.items.empty())
        poison((char*)pointer, freed);
    else
        queue(block.stream, [pointer] { poison((char*)pointer, state().freed.at((char*)pointer)); });
    release_freed();
}

size_t rounded(size_t nbytes) {
    return (nbytes + 511) / 512 * 512;
}

struct DeviceAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        State& all = state();
        if (nbytes == 0) return {nullptr, nullptr, &free_device, kDevice};
        Lock lock(all.mutex);
        TORCH_CHECK_WITH(OutOfMemoryError, all.allocated + nbytes <= all.capacity - kReserved,
                         "CUDA out of memory. Tried to allocate ", nbytes / 1048576.0,
                         " MiB. GPU 0 has a total capacity of ", all.capacity / 1048576.0, " MiB of which ",
                         (all.capacity - kReserved - all.allocated) / 1048576.0, " MiB is free (simulated).");
        drift();
        char* memory = (char*)std::aligned_alloc(512, rounded(nbytes));
        TORCH_CHECK(memory, "the host has no memory for the simulated GPU");
        std::memset(memory, kPoison, nbytes);
        all.blocks[memory] = {nbytes, current_stream, {}, {}};
        all.allocated += nbytes;
        all.peak = std::max(all.peak, all.allocated);
        all.total += nbytes;
        ++all.allocations;
        return {memory, memory, &free_device, kDevice};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
    void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};

DeviceAllocator device_allocator;

void free_pinned(void* pointer) {
    State& all = state();
    Lock lock(all.mutex);
    all.registered.erase((char*)pointer);
    all.pinned.erase((char*)pointer);
    all.freed_pinned.push_back((char*)pointer);
    release_freed();
}

struct PinnedAllocator final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        if (nbytes == 0) return {nullptr, nullptr, &free_pinned, c10::Device(c10::DeviceType::CPU)};
        char* memory = (char*)std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
        TORCH_CHECK(memory, "no memory");
        Lock lock(state().mutex);
        state().registered[memory] = nbytes;
        state().pinned[memory] = nbytes;
        return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
};

PinnedAllocator pinned_allocator;

void record_stream(const void* pointer, StreamId stream) {
    State& all = state();
    Lock lock(all.mutex);
    auto after = all.blocks.upper_bound((char*)pointer);
    if (after == all.blocks.begin()) return;
    Block& block = (--after)->second;
    if ((char*)pointer < after->first + block.nbytes && block.stream != stream) block.used_by.insert(stream);
}

// Torch computes with these tensors on the current stream, now.
template <typename Tensors>
void note_uses(const Tensors& tensors) {
    State& all = state();
    Lock lock(all.mutex);
    std::vector<Block*> foreign;
    for (const Tensor& tensor : tensors) {
        if (!tensor.defined() || !tensor.is_cuda()) continue;
        const auto found = all.blocks.find((char*)tensor.storage().data_ptr().get());
        if (found != all.blocks.end() && found->second.stream != current_stream) foreign.push_back(&found->second);
    }
    if (foreign.empty()) return;
    queue(current_stream, [] {});
    for (Block* block : foreign)
        block->read_by[current_stream] = all.streams[current_stream].queued;
}

// ---- what torch asks of a device
// --------------------------------------------------------------------------------------

struct Event {
    StreamId stream = 0;
    Ticket ticket = 0;
};

// The host knows that a stream has done so much, and what that waited for.
void know(StreamId id, Ticket ticket) {
    Stream& stream = state().streams[id];
    stream.known = std::max(stream.known, ticket);
    for (const auto& [other, waited] : stream.waited)
        state().streams[other].known = std::max(state().streams[other].known, waited);
}

void know_current() {
    Lock lock(state().mutex);
    know(current_stream, state().streams[current_stream].queued);
}

void synchronize(StreamId stream, Ticket ticket) {
    State& all = state();
    Lock lock(all.mutex);
    drift();
    run_to(stream, ticket);
    know(stream, ticket);
    release_freed();
}

void wait_for(StreamId stream, StreamId awaited, Ticket ticket) {
    State& all = state();
    Lock lock(all.mutex);
    if (stream == awaited) return;
    auto& waited = all.streams[stream].waited;
    waited[awaited] = std::max(waited[awaited], ticket);
    for (const auto& [other, before] : all.streams[awaited].waited)
        waited[other] = std::max(waited[other], before);
    if (all.streams[awaited].done >= ticket) return;
    queue(stream, Item{nullptr, awaited, ticket, {}, false});
}

StreamId new_stream() {
    Lock lock(state().mutex);
    state().next_stream += 0x100;
    state().streams[state().next_stream];
    return state().next_stream;
}

void synchronize_all() {
    Lock lock(state().mutex);
    drift();
    std::vector<StreamId> ids;
    for (const auto& entry : state().streams)
        ids.push_back(entry.first);
    for (StreamId id : ids) {
        run_to(id, state().streams[id].queued);
        know(id, state().streams[id].queued);
    }
    release_freed();
}

// A GPU gets round to it in the end, however often it is asked.
bool query(StreamId stream, Ticket ticket) {
    State& all = state();
    Lock lock(all.mutex);
    drift();
    const bool done = all.streams[stream].done >= ticket;
    if (done)
        know(stream, ticket);
    else
        run_to(stream, all.streams[stream].done + 1);
    release_freed();
    return done;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
    c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
    c10::Device getDevice() const override { return kDevice; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const noexcept override { return made(current_stream); }
    c10::Stream getDefaultStream(c10::Device) const override { return made(0); }
    c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
        const StreamId before = current_stream;
        current_stream = stream.id();
        return made(before);
    }
    c10::Stream getNewStream(c10::Device, int) const override { return made(new_stream()); }
    c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return made(new_stream()); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void synchronizeDevice(const c10::DeviceIndex) const override {
        note_round_trip("synchronize the device");
        synchronize_all();
    }
    void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
        Lock lock(state().mutex);
        if (!*event) *event = new Event;
        *(Event*)*event = {stream.id(), state().streams[stream.id()].queued};
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event) wait_for(stream.id(), ((Event*)event)->stream, ((Event*)event)->ticket);
    }
    bool queryEvent(void* event) const override {
        return !event || query(((Event*)event)->stream, ((Event*)event)->ticket);
    }
    void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (Event*)event; }
    bool queryStream(const c10::Stream& stream) const override {
        return query(stream.id(), state().streams[stream.id()].queued);
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        note_round_trip("synchronize a stream");
        synchronize(stream.id(), state().streams[stream.id()].queued);
    }
    void synchronizeEvent(void* event) const override {
        note_round_trip("synchronize an event");
        if (event) synchronize(((Event*)event)->stream, ((Event*)event)->ticket);
    }
    void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
        record_stream(memory.get(), stream.id());
    }

    static c10::Stream made(StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
    void init() const override {}
    bool hasCUDA() const override { return true; }
    bool isBuilt() const { return true; }  // not all versions of torch ask
    bool isAvailable() const { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    bool isPinnedPtr(const void* data) const override {
        Lock lock(state().mutex);
        return is_pinned(data);
    }
    at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
    at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
    c10::Device getDeviceFromPtr(void*) const override { return kDevice; }
    int getNumGPUs() const override { return 1; }
    c10::DeviceIndex deviceCount() const { return 1; }
    c10::DeviceIndex current_device() const override { return 0; }
    c10::DeviceIndex getCurrentDevice() const { return 0; }
    void setCurrentDevice(c10::DeviceIndex) const {}
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const { return 0; }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const { return 0; }
};

// torch has made its hooks, for a build without CUDA, by the time this is loaded. They hold no data: what makes them
// other ones is the table of their functions.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface) && sizeof(Hooks) == sizeof(void*));
const bool hooked = [] {
    static const Hooks ours;
    std::memcpy((void*)&at::detail::getCUDAHooks(), (const void*)&ours, sizeof(void*));
    return true;
}();

// ---- every operation: its CPU kernel, over the same memory
// ----------------------------------------------------------

bool on_gpu(const Tensor& tensor) {
    return tensor.defined() && tensor.is_cuda();
}

Tensor over(c10::Storage storage, const Tensor& tensor) {
    Tensor made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage),
                                                           c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = made.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    return made;
}

c10::Storage host_storage(const c10::Storage& storage) {
    return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                        c10::DataPtr(storage.data_ptr().get(), c10::Device(c10::DeviceType::CPU)),
                        c10::GetCPUAllocator(), true);
}

// The tensor's memory as a CPU tensor, which does not keep it alive.
Tensor bare(const Tensor& tensor) {
    return over(host_storage(tensor.storage()), tensor);
}

Tensor empty_like_on_gpu(const Tensor& tensor) {
    const auto keys = c10::DispatchKeySet(c10::DispatchKey::CUDA);
    Tensor made = at::detail::empty_strided_generic(tensor.sizes(), tensor.strides(), &device_allocator, keys,
                                                    tensor.scalar_type());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
}

bool dense(const Tensor& tensor) {
    return tensor.is_non_overlapping_and_dense();
}

void copy_host(const Tensor& to, const Tensor& from) {
    if (to.numel() == 0) return;
    if (to.dtype() == from.dtype() && to.strides() == from.strides() && to.sizes() == from.sizes() && dense(to))
        std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
    else {
        at::AutoDispatchBelowADInplaceOrView below;
        to.copy_(from);
    }
}

Tensor cloned(const Tensor& host) {
    at::AutoDispatchBelowADInplaceOrView below;
    return host.clone();
}

// The operation has written to `memory`. Take that back until the stream comes to it: another stream that does not wait
// sees what was there before.
void put_off(const Tensor& memory, const Tensor& before, const Tensor& after) {
    copy_host(memory, before);
    Lock lock(state().mutex);
    queue(current_stream, [memory, after] { copy_host(memory, after); });
}

class Call {
  public:
    explicit Call(const c10::OperatorHandle& op) : op_(op), put_off_(adversarial()) {}

    void run(torch::jit::Stack* stack) {
        const auto& schema = op_.schema();
        const size_t count = schema.arguments().size(), begin = stack->size() - count;
        check_devices(*stack, begin);
        drain();
        trip_ = note(*stack, begin);
        for (size_t i = 0; i < count; ++i) {
            const auto* alias = schema.arguments()[i].alias_info();
            writes_ = alias && alias->isWrite();
            (*stack)[begin + i] = to_host((*stack)[begin + i]);
        }
        if (put_off_)
            for (Passed& passed : passed_)
                if (passed.written && passed.host.numel() && !passed.host.is_meta())
                    passed.before = cloned(passed.host);
        {
            at::AutoDispatchBelowADInplaceOrView below;
            op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
        }
        for (Passed& passed : passed_)
            if (passed.written) written(passed);
        for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
            (*stack)[i] = to_gpu((*stack)[i]);
        std::vector<Tensor> tensors;
        for (const Passed& passed : passed_)
            tensors.push_back(passed.gpu);
        note_uses(tensors);
        if (trip_) know_current();
    }

  private:
    struct Passed {
        Tensor gpu, host, before;
        bool written;
    };

    template <typename Visit>
    static void visit(const c10::IValue& value, const Visit& visitor) {
        if (value.isTensor())
            visitor(value.toTensor());
        else if (value.isList())
            for (const c10::IValue& item : value.toListRef())
                visit(item, visitor);
    }

    const std::string& name() const { return op_.schema().name(); }

    bool indexes() const {
        return name().rfind("aten::index", 0) == 0 || name().rfind("aten::_index_put", 0) == 0 ||
               name().rfind("aten::_unsafe_index", 0) == 0;
    }

    void check_devices(const torch::jit::Stack& stack, size_t begin) const {
        const Tensor* far = nullptr;
        for (size_t i = begin; i < stack.size(); ++i) {
            if (indexes() && stack[i].isList() && stack[begin].isTensor()) {
                TORCH_CHECK(on_gpu(stack[begin].toTensor()),
                            "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
                continue;
            }
            visit(stack[i], [&](const Tensor& tensor) {
                if (tensor.defined() && !tensor.is_cuda() && tensor.dim() > 0) far = &tensor;
            });
        }
        TORCH_CHECK(!far, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ",
                    far ? far->device().str() : "", "! (when checking arguments of ", name(), ")");
    }

    // Operations whose result tells the host something, or whose size does.
    bool note(const torch::jit::Stack& stack, size_t begin) const {
        static const std::unordered_set<std::string> sized = {
            "aten::nonzero",    "aten::masked_select",          "aten::_unique2",
            "aten::unique_dim", "aten::unique_consecutive",     "aten::_unique",
            "aten::bincount",   "aten::unique_dim_consecutive", "aten::_local_scalar_dense"};
        bool trip = sized.count(name());
        if (name() == "aten::repeat_interleave") trip = stack.back().isNone();
        if (indexes())
            for (size_t i = begin; i < stack.size(); ++i)
                if (stack[i].isList())
                    visit(stack[i], [&](const Tensor& index) {
                        if (index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte))
                            trip = true;
                    });
        for (const auto& returned : op_.schema().returns())
            switch (returned.type()->kind()) {
                case c10::TypeKind::BoolType:
                case c10::TypeKind::IntType:
                case c10::TypeKind::FloatType:
                case c10::TypeKind::NumberType:
                    trip = true;
                default:
                    break;
            }
        if (trip) note_round_trip(name().substr(6));
        return trip;
    }

    Tensor host(const Tensor& tensor) {
        if (!on_gpu(tensor)) return tensor;
        auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
        if (found == storages_.end())
            found = storages_.emplace(tensor.storage().unsafeGetStorageImpl(), host_storage(tensor.storage())).first;
        passed_.push_back({tensor, over(found->second, tensor), Tensor(), writes_});
        return passed_.back().host;
    }

    c10::IValue to_host(const c10::IValue& value) {
        if (value.isTensor()) return host(value.toTensor());
        if (value.isTensorList()) {
            c10::List<Tensor> made;
            for (const Tensor& tensor : value.toTensorVector())
                made.push_back(host(tensor));
            return made;
        }
        if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> made;
            for (const c10::IValue& item : value.toListRef())
                made.push_back(item.isNone() ? std::optional<Tensor>() : host(item.toTensor()));
            return made;
        }
        if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
        return value;
    }

    void written(Passed& passed) {
        const auto* ours = passed.gpu.storage().data_ptr().get();
        const auto& theirs = passed.host.storage();
        if (theirs.data_ptr().get() != ours) {  // resized, and so elsewhere
            c10::Storage storage = passed.gpu.storage();
            storage.set_data_ptr(device_allocator.allocate(theirs.nbytes()));
            storage.set_nbytes(theirs.nbytes());
            passed.before = Tensor();
        }
        if (passed.gpu.sizes() != passed.host.sizes() || passed.gpu.strides() != passed.host.strides())
            passed.gpu.unsafeGetTensorImpl()->set_sizes_and_strides(passed.host.sizes(), passed.host.strides(),
                                                                    passed.host.storage_offset());
        const Tensor memory = bare(passed.gpu);
        if (memory.numel() == 0) return;
        if (passed.before.defined() && passed.before.sizes() == memory.sizes())
            put_off(memory, passed.before, cloned(passed.host));
        else if (theirs.data_ptr().get() != passed.gpu.storage().data_ptr().get()) {
            if (put_off_)
                fresh(memory, cloned(passed.host));
            else
                copy_host(memory, passed.host);
        }
    }

    // New memory, which holds nothing until the stream comes to it.
    void fresh(const Tensor& memory, const Tensor& value) {
        Lock lock(state().mutex);
        queue(current_stream, [memory, value] { copy_host(memory, value); });
    }

    Tensor gpu(const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == c10::kStrided, "the simulated GPU has no ", tensor.layout(),
                                    " tensors, such as ", name(), " returns");
        for (const Passed& passed : passed_)
            if (passed.host.is_same(tensor)) return passed.gpu;
        for (const Passed& passed : passed_)
            if (tensor.has_storage() && passed.host.storage().is_alias_of(tensor.storage())) {
                Tensor view = at::detail::make_tensor<c10::TensorImpl>(
                    c10::TensorImpl::VIEW, c10::Storage(passed.gpu.storage()), passed.gpu.key_set(), tensor.dtype());
                view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                                  tensor.storage_offset());
                return view;
            }
        Tensor made = empty_like_on_gpu(tensor);
        if (tensor.numel() && put_off_)
            fresh(bare(made), tensor);
        else
            copy_host(bare(made), tensor);
        return made;
    }

    c10::IValue to_gpu(const c10::IValue& value) {
        if (value.isTensor()) return gpu(value.toTensor());
        if (value.isTensorList()) {
            c10::List<Tensor> made;
            for (const Tensor& tensor : value.toTensorVector())
                made.push_back(gpu(tensor));
            return made;
        }
        return value;
    }

    const c10::OperatorHandle& op_;
    const bool put_off_;
    bool writes_ = false, trip_ = false;
    std::deque<Passed> passed_;
    std::map<c10::StorageImpl*, c10::Storage> storages_;
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    Call(op).run(stack);
}

// ---- operations of their own
// ------------------------------------------------------------------------------------------

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
    TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator,
                                     c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                     dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                             &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                             dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                  std::optional<c10::SymInt> offset) {
    std::optional<int64_t> begin;
    if (offset) begin = offset->guard_int(__FILE__, __LINE__);
    return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                             begin);
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                offset.guard_int(__FILE__, __LINE__));
    return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
    auto* impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(source.storage());
    impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
    return self;
}

bool pinned(const Tensor& tensor) {
    Lock lock(state().mutex);
    return tensor.numel() && is_pinned(tensor.const_data_ptr());
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
    if (self.is_same(source)) return self;
    Tensor from = source;
    if (from.sizes() != self.sizes()) {
        at::AutoDispatchBelowADInplaceOrView below;
        from = from.expand_as(self);
    }
    if (self.numel() == 0) return self;
    drain();
    const Tensor to = on_gpu(self) ? bare(self) : self;
    if (on_gpu(self) && on_gpu(from)) {
        const bool later = adversarial();
        const Tensor before = later ? cloned(to) : Tensor();
        copy_host(to, bare(from));
        if (later) put_off(to, before, cloned(to));
        note_uses(std::array<Tensor, 2>{self, from});
        return self;
    }
    const Tensor& near = on_gpu(self) ? from : self;
    if (non_blocking && pinned(near)) {
        // The host's memory is read or written when the stream comes to it.
        const Tensor host_to = bare(self), host_from = bare(from);
        Lock lock(state().mutex);
        queue(current_stream, [host_to, host_from] { copy_host(host_to, host_from); }, {near.const_data_ptr()});
    } else if (on_gpu(self) && non_blocking) {
        const Tensor staged = cloned(from), host_to = bare(self);  // as the driver does with what is not pinned
        Lock lock(state().mutex);
        queue(current_stream, [host_to, staged] { copy_host(host_to, staged); });
    } else {
        note_round_trip(on_gpu(self) ? "copy to the device" : "copy to the host");
        copy_host(to, on_gpu(from) ? bare(from) : from);
        know_current();
    }
    note_uses(std::array<Tensor, 2>{self, from});
    return self;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("view", &view);
    m.impl("as_strided", &as_strided);
    m.impl("_reshape_alias", &reshape_alias);
    m.impl("set_.source_Storage_storage_offset", &set_storage);
    m.impl("set_.source_Tensor", &set_tensor);
    m.impl("copy_", &copy);
}

}  // namespace

// ---- for ctypes
// ------------------------------------------------------------------------------------------------------

// Returns what was wrong about the addresses it was given, or null.
using Kernel = const char* (*)(unsigned int grid, unsigned int block, void** arguments, int (*legal)(const void*));

extern "C" {

void simulated_policy(int policy, uint64_t seed) {
    Lock lock(state().mutex);
    state().policy = policy;
    state().random.seed(seed);
}

void simulated_on_round_trip(int (*callback)(const char*)) {
    round_trip_callback = callback;
}

int64_t simulated_current_stream() {
    return current_stream;
}

int64_t simulated_exchange_stream(int64_t stream) {
    std::swap(stream, current_stream);
    return stream;
}

int64_t simulated_new_stream() {
    return new_stream();
}

int simulated_is_stream(int64_t stream) {
    Lock lock(state().mutex);
    return stream == 0 || state().streams.count(stream);
}

uint64_t simulated_record(int64_t stream) {
    Lock lock(state().mutex);
    return state().streams[stream].queued;
}

void simulated_wait(int64_t stream, int64_t awaited, uint64_t ticket) {
    wait_for(stream, awaited, ticket);
}

int simulated_query(int64_t stream, uint64_t ticket) {
    return query(stream, ticket);
}

void simulated_synchronize(int64_t stream, uint64_t ticket) {
    synchronize(stream, ticket);
}

void simulated_synchronize_all() {
    synchronize_all();
}

// Work that does nothing but is there.
void simulated_sleep() {
    Lock lock(state().mutex);
    queue(current_stream, Item{[] {}, -1, 0, {}, true});
}

int64_t simulated_pending() {
    return state().pending;
}

void simulated_record_stream(const void* pointer, int64_t stream) {
    record_stream(pointer, stream);
}

static int legal(const void* pointer) {
    return is_device(pointer) || is_pinned(pointer);
}

// Queue a kernel; `arguments` are copied.
void simulated_launch(int64_t stream, Kernel kernel, unsigned int grid, unsigned int block,
                      const void* const* arguments, const size_t* sizes, int count) {
    struct alignas(16) Unit {
        char bytes[16];
    };
    auto copies = std::make_shared<std::vector<std::vector<Unit>>>();
    for (int i = 0; i < count; ++i) {
        copies->emplace_back((sizes[i] + sizeof(Unit) - 1) / sizeof(Unit));
        std::memcpy(copies->back().data(), arguments[i], sizes[i]);
    }
    Lock lock(state().mutex);
    queue(stream, [kernel, grid, block, copies] {
        std::vector<void*> pointers;
        for (auto& copy : *copies)
            pointers.push_back(copy.data());
        if (const char* wrong = kernel(grid, block, pointers.data(), &legal))
            fail(std::string("an illegal memory access was encountered: ") + wrong);
    });
}

// kind: cudaMemcpyHostToDevice 1, DeviceToHost 2, DeviceToDevice 3, Default 4. Returns a cudaError_t.
int simulated_memcpy(void* to, const void* from, size_t nbytes, int kind, int64_t stream) {
    State& all = state();
    Lock lock(all.mutex);
    if (nbytes == 0) return 0;
    const bool to_device = is_device(to), from_device = is_device(from);
    if (kind < 0 || kind > 4) return 21;
    if ((kind == 1 && (!to_device || from_device)) || (kind == 2 && (to_device || !from_device)) ||
        (kind == 3 && !(to_device && from_device)))
        return 1;
    const auto copy = [=] { std::memcpy(to, from, nbytes); };
    if ((to_device || is_pinned(to)) && (from_device || is_pinned(from))) {
        queue(stream, copy, {from_device ? to : from});
    } else if (to_device) {
        const auto staged = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + nbytes);
        queue(stream, [=] { std::memcpy(to, staged->data(), nbytes); });
    } else {
        run_to(stream, all.streams[stream].queued);
        copy();
    }
    return 0;
}

int simulated_memset(void* to, int value, size_t nbytes, int64_t stream) {
    Lock lock(state().mutex);
    if (!legal(to)) return 1;
    queue(stream, [=] { std::memset(to, value, nbytes); });
    return 0;
}

// cudaMemoryType: unregistered 0, host 1, device 2.
int simulated_memory_type(const void* pointer) {
    Lock lock(state().mutex);
    return is_device(pointer) ? 2 : is_pinned(pointer);
}

int simulated_register(void* pointer, size_t nbytes) {
    State& all = state();
    Lock lock(all.mutex);
    if (!pointer || !nbytes) return 1;
    auto next = all.registered.lower_bound((char*)pointer);
    if (next != all.registered.end() && next->first < (char*)pointer + nbytes) return 712;
    if (is_pinned(pointer)) return 712;
    all.registered[(char*)pointer] = nbytes;
    return 0;
}

int simulated_unregister(void* pointer) {
    State& all = state();
    Lock lock(all.mutex);
    const auto found = all.registered.find((char*)pointer);
    if (found == all.registered.end() || all.pinned.count((char*)pointer)) return 713;
    for (const auto& [id, stream] : all.streams)
        for (const Item& item : stream.items)
            for (const void* address : item.of)
                if (address >= found->first && address < found->first + found->second)
                    fail("host memory was unregistered while a copy of it was queued");
    all.registered.erase(found);
    return 0;
}

// allocated, peak, allocations, bytes allocated in all, capacity, free
void simulated_memory(uint64_t* numbers) {
    Lock lock(state().mutex);
    numbers[0] = state().allocated;
    numbers[1] = state().peak;
    numbers[2] = state().allocations;
    numbers[3] = state().total;
    numbers[4] = state().capacity;
    numbers[5] = state().capacity - kReserved - state().allocated;
}

void simulated_reset_peak() {
    Lock lock(state().mutex);
    state().peak = state().allocated;
}

void simulated_set_capacity(uint64_t nbytes) {
    Lock lock(state().mutex);
    state().capacity = nbytes;
}

// The first thing that went wrong on the device since it was last asked for; 0 if nothing did.
int simulated_take_fault(char* text, size_t room) {
    Lock lock(state().mutex);
    if (state().fault.empty()) return 0;
    std::strncpy(text, state().fault.c_str(), room - 1);
    text[room - 1] = 0;
    state().fault.clear();
    state().faulty = false;
    return 1;
}
}
