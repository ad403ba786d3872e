// Operations that do not compute: new tensors, views, copies.
#pragma once

#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <array>

#include "operations.h"

namespace {

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

TORCH_LIBRARY(simulated_gpu, m) {
    m.def("default_generator() -> Generator?", [] { return default_randomness(); });
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
