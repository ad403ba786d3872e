// Every operation: torch's CPU kernel, over the same memory.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>

#include <unordered_map>
#include <unordered_set>

#include "hooks.h"

namespace {

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

// What an operation's schema says of it.
struct Traits {
    bool indexes = false, trips = false, repeats = false, draws = false;
    std::vector<bool> writes, on_gpu;  // for each argument

    explicit Traits(const c10::OperatorHandle& op) {
        // Operations whose result tells the host something, or whose size does.
        static const std::unordered_set<std::string> sized = {
            "aten::nonzero",    "aten::masked_select",          "aten::_unique2",
            "aten::unique_dim", "aten::unique_consecutive",     "aten::_unique",
            "aten::bincount",   "aten::unique_dim_consecutive", "aten::_local_scalar_dense"};
        const auto& schema = op.schema();
        const std::string& name = schema.name();
        indexes = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index_put", 0) == 0 ||
                  name.rfind("aten::_unsafe_index", 0) == 0;
        repeats = name == "aten::repeat_interleave";
        trips = sized.count(name);
        for (const auto& returned : schema.returns())
            switch (returned.type()->kind()) {
                case c10::TypeKind::BoolType:
                case c10::TypeKind::IntType:
                case c10::TypeKind::FloatType:
                case c10::TypeKind::NumberType:
                    trips = true;
                default:
                    break;
            }
        draws = op.hasTag(at::Tag::nondeterministic_seeded);
        for (const auto& argument : schema.arguments()) {
            draws = draws || argument.type()->str().rfind("Generator", 0) == 0;
            writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
            on_gpu.push_back(argument.name() == "state_steps");
        }
    }

    // Kept: a step calls few operations, often.
    static const Traits& of(const c10::OperatorHandle& op) {
        thread_local std::unordered_map<const void*, Traits> known;
        return known.try_emplace(&op.schema(), op).first->second;
    }
};

class Call {
  public:
    explicit Call(const c10::OperatorHandle& op) : op_(op), traits_(Traits::of(op)), put_off_(adversarial()) {}

    void run(torch::jit::Stack* stack) {
        const auto& schema = op_.schema();
        const size_t count = schema.arguments().size(), begin = stack->size() - count;
        check_devices(*stack, begin);
        drain();
        trip_ = note(*stack, begin);
        for (size_t i = 0; i < count; ++i) {
            writes_ = traits_.writes[i];
            (*stack)[begin + i] = to_host((*stack)[begin + i]);
        }
        if (put_off_)
            for (Passed& passed : passed_)
                if (passed.written && passed.host.numel() && !passed.host.is_meta())
                    passed.before = cloned(passed.host);
        {
            const Drawn drawn(randomness(*stack, begin));
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

    // While an operation runs that draws from a generator of the device, the CPU's own has that one's state.
    struct Drawn {
        std::optional<at::Generator> from;
        at::Generator cpu = at::detail::getDefaultCPUGenerator();
        Tensor before;

        explicit Drawn(std::optional<at::Generator> generator) : from(std::move(generator)) {
            if (!from) return;
            before = cpu.get_state();
            cpu.set_state(from->get_state());
        }
        Drawn(const Drawn&) = delete;
        ~Drawn() {
            if (!from) return;
            from->set_state(cpu.get_state());
            cpu.set_state(before);
        }
    };

    // The generator that the operation draws from, if it does; it is taken out of the arguments.
    std::optional<at::Generator> randomness(torch::jit::Stack& stack, size_t begin) const {
        if (!traits_.draws) return std::nullopt;
        at::Generator found = default_randomness();
        for (size_t i = 0; i < op_.schema().arguments().size(); ++i) {
            c10::IValue& value = stack[begin + i];
            if (!value.isGenerator()) continue;
            found = value.toGenerator();
            TORCH_CHECK(found.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                        found.device().str(), "'");
            value = c10::IValue();
        }
        return found;
    }

    template <typename Visit>
    static void visit(const c10::IValue& value, const Visit& visitor) {
        if (value.isTensor())
            visitor(value.toTensor());
        else if (value.isList())
            for (const c10::IValue& item : value.toListRef())
                visit(item, visitor);
    }

    const std::string& name() const { return op_.schema().name(); }

    void check_devices(const torch::jit::Stack& stack, size_t begin) const {
        const Tensor* far = nullptr;
        for (size_t i = begin; i < stack.size(); ++i) {
            if (traits_.indexes && stack[i].isList() && stack[begin].isTensor()) {
                TORCH_CHECK(on_gpu(stack[begin].toTensor()),
                            "indices should be either on cpu or on the same device as the indexed tensor (cpu)");
                continue;
            }
            visit(stack[i], [&](const Tensor& tensor) {
                if (tensor.defined() && !tensor.is_cuda() && tensor.dim() > 0) far = &tensor;
            });
        }
        for (size_t i = begin; i < stack.size(); ++i)
            if (traits_.on_gpu[i - begin])
                visit(stack[i], [&](const Tensor& tensor) {
                    TORCH_CHECK(on_gpu(tensor), "an illegal memory access was encountered: ", name(),
                                " reads the number of steps from host memory");
                });
        TORCH_CHECK(!far, "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and ",
                    far ? far->device().str() : "", "! (when checking arguments of ", name(), ")");
    }

    bool note(const torch::jit::Stack& stack, size_t begin) const {
        bool trip = traits_.repeats ? stack.back().isNone() : traits_.trips;
        if (traits_.indexes)
            for (size_t i = begin; i < stack.size(); ++i)
                if (stack[i].isList())
                    visit(stack[i], [&](const Tensor& index) {
                        if (index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte))
                            trip = true;
                    });
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
    const Traits& traits_;
    const bool put_off_;
    bool writes_ = false, trip_ = false;
    std::deque<Passed> passed_;
    std::map<c10::StorageImpl*, c10::Storage> storages_;
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    Call(op).run(stack);
}

}  // namespace
