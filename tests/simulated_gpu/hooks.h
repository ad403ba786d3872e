// What torch asks of a device: its guard, its random numbers, its hooks.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "events.h"

namespace {

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

// Random numbers of the device: the CPU's kind, from a state of the device's own. A tensor of the CPU does not take it.
struct Randomness final : at::CPUGeneratorImpl {
    explicit Randomness(uint64_t seed = c10::default_rng_seed_val) : CPUGeneratorImpl(seed) {
        device_ = kDevice;
        key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
    }

  private:
    Randomness* clone_impl() const override {
        auto* made = new Randomness();
        made->set_state(*get_state());
        return made;
    }
};

const at::Generator& default_randomness() {
    static const at::Generator made = at::make_generator<Randomness>();
    return made;
}

struct Hooks final : at::CUDAHooksInterface {
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_randomness(); }
    at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Randomness>(); }
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

}  // namespace
