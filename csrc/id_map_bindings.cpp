// The id map for Python. Pointers are integers, as in bindings.cpp.
#include "id_map_bindings.h"

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "buffer.h"
#include "id_map.h"
#include "pointer.h"
#include "texts.h"
#include "without_gil.h"

namespace py = pybind11;

namespace speedswap {
namespace {

// numbers, count, text, offsets; the last two are 0 unless keys are exact strings.
using KeysTuple = std::tuple<uintptr_t, int64_t, uintptr_t, uintptr_t>;

Keys keys_of(const KeysTuple& tuple) {
    const auto [numbers, count, text, offsets] = tuple;
    return {at<const uint64_t>(numbers), count, at<const char>(text), at<const int64_t>(offsets)};
}

// False where the map is full.
bool add(IdMap& map, const KeysTuple& tuple, uintptr_t rows, IdMap::Undo* undo, int threads) {
    const Keys keys = keys_of(tuple);
    return without_gil([&] { return map.add(keys, at<int64_t>(rows), undo, threads); });
}

// The maps, their keys, and the ways back; the rows of all lie side by side. Returns -1, or the map that is full.
int64_t add_to_maps(const std::vector<std::tuple<IdMap*, KeysTuple, IdMap::Undo*>>& batches, uintptr_t rows,
                    int threads) {
    std::vector<Addition> additions;
    int64_t* to = at<int64_t>(rows);
    for (const auto& [map, tuple, undo] : batches) {
        additions.push_back({*map, keys_of(tuple), to, *undo});
        to += additions.back().keys.count;
    }
    return without_gil([&] { return add_all(additions, threads); });
}

using CursorTuple = std::tuple<int64_t, int64_t, int64_t, int64_t>;

IdMap::Cursor cursor_of(const CursorTuple& tuple) {
    const auto [used, clock, probation_used, ring] = tuple;
    return {used, clock, probation_used, ring};
}

// Where a table's cells are saved to and restored from: by cell, from 1 on. Texts lie side by side.
struct Saved {
    uint64_t* numbers;
    uint32_t* last;
    uint32_t* counts;
    int64_t* offsets;
    char* text;
};
using SavedTuple = std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t>;

Saved saved_at(const SavedTuple& tuple) {
    const auto [numbers, last, counts, offsets, text] = tuple;
    return {at<uint64_t>(numbers), at<uint32_t>(last), at<uint32_t>(counts), at<int64_t>(offsets), at<char>(text)};
}

// The i-th of some cells, or of all where none are given.
int64_t cell_at(uintptr_t cells, int64_t i) {
    return cells == 0 ? i + 1 : at<const int32_t>(cells)[i];
}

int64_t text_bytes(const IdMap& map, bool on_probation, uintptr_t cells, int64_t count) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; ++i)
        bytes += map.key_of(on_probation, cell_at(cells, i)).length;
    return bytes;
}

void save(const IdMap& map, bool on_probation, uintptr_t cells, int64_t count, const SavedTuple& tuple) {
    const Saved saved = saved_at(tuple);
    int64_t end = 0;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t cell = cell_at(cells, i);
        const Key key = map.key_of(on_probation, cell);
        const uint32_t seen = map.count(on_probation, cell);
        saved.numbers[i] = key.number;
        if (saved.last != nullptr) saved.last[i] = map.last(cell);
        if (saved.counts != nullptr) saved.counts[i] = seen;
        if (saved.offsets == nullptr) continue;
        saved.offsets[i] = end;
        if (key.length > 0) std::memcpy(saved.text + end, key.text, size_t(key.length));
        end += key.length;
    }
    if (saved.offsets != nullptr) saved.offsets[count] = end;
}

// Returns false for a key that occurs twice. Counts of 0 mark cells on probation without a key.
bool restore(IdMap& map, const CursorTuple& tuple, const SavedTuple& rows, const SavedTuple& probation) {
    const IdMap::Cursor cursor = cursor_of(tuple);
    map.restore(cursor);
    for (const bool on_probation : {false, true}) {
        const Saved saved = saved_at(on_probation ? probation : rows);
        const int64_t count = on_probation ? cursor.probation_used : cursor.used;
        const Keys keys = {saved.numbers, count, saved.text, saved.offsets};
        for (int64_t i = 0; i < count; ++i) {
            const uint32_t seen = saved.counts == nullptr ? 0 : saved.counts[i];
            if (on_probation && seen == 0) continue;
            if (i + 16 < count) map.keys(on_probation).prefetch(saved.numbers[i + 16]);
            if (on_probation && map.keys(false).find(key_at(keys, i)) != 0) return false;
            const uint32_t last = saved.last == nullptr ? 0 : saved.last[i];
            if (!map.restore(on_probation, i + 1, key_at(keys, i), last, seen)) return false;
        }
    }
    return true;
}

// The texts of a sequence of str and bytes: bytes and offsets.
py::tuple texts_of(const py::sequence& strings) {
    const auto fast = py::reinterpret_steal<py::object>(PySequence_Fast(strings.ptr(), "keys is not a sequence"));
    if (!fast) throw py::error_already_set();
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
    PyObject** const items = PySequence_Fast_ITEMS(fast.ptr());
    std::string bytes;
    py::object encoded;
    Buffer offsets((count + 1) * int64_t(sizeof(int64_t)));
    for (Py_ssize_t i = 0; i < count; ++i) {
        offsets.as<int64_t>()[i] = int64_t(bytes.size());
        Py_ssize_t length = 0;
        const char* text = nullptr;
        if (PyUnicode_Check(items[i])) {
            text = PyUnicode_AsUTF8AndSize(items[i], &length);
            if (text == nullptr) {  // a lone surrogate, in three bytes as in NumPy's strings
                PyErr_Clear();
                encoded =
                    py::reinterpret_steal<py::object>(PyUnicode_AsEncodedString(items[i], "utf-8", "surrogatepass"));
                if (!encoded) throw py::error_already_set();
                text = PyBytes_AS_STRING(encoded.ptr());
                length = PyBytes_GET_SIZE(encoded.ptr());
            }
        } else if (PyBytes_Check(items[i])) {
            text = PyBytes_AS_STRING(items[i]);
            length = PyBytes_GET_SIZE(items[i]);
        } else {
            const std::string kind = Py_TYPE(items[i])->tp_name;
            throw py::type_error("keys[" + std::to_string(i) + "] is of type " + kind + "; give strings");
        }
        bytes.append(text, size_t(length));
    }
    offsets.as<int64_t>()[count] = int64_t(bytes.size());
    return py::make_tuple(buffer_of(bytes.data(), bytes.size()), std::move(offsets));
}

// The texts of NumPy's fixed-width strings.
py::tuple texts_of_fixed(uintptr_t strings, int64_t count, int64_t width, bool ucs4) {
    Buffer offsets((count + 1) * int64_t(sizeof(int64_t))), bytes;
    without_gil([&] {
        const char* const source = at<const char>(strings);
        bytes = Buffer(measure_fixed(source, count, width, ucs4, offsets.as<int64_t>()));
        pack_fixed(source, count, width, ucs4, offsets.as<int64_t>(), bytes.data());
    });
    return py::make_tuple(std::move(bytes), std::move(offsets));
}

}  // namespace

void bind_id_map(py::module_& module) {
    using py::arg;
    py::class_<IdMap::Undo>(module, "IdMapUndo")
        .def(py::init())
        .def_property_readonly("applied", &IdMap::Undo::applied);
    py::class_<IdMap>(module, "IdMap")
        .def(py::init([](int64_t capacity, bool exact, int64_t admit_after, int evict, int64_t most_on_probation) {
                 return std::make_unique<IdMap>(capacity, exact, admit_after, Evict(evict), most_on_probation);
             }),
             arg("capacity"), arg("exact"), arg("admit_after"), arg("evict"), arg("most_on_probation"))
        .def(
            "find",
            [](const IdMap& map, const KeysTuple& keys, uintptr_t rows, int threads) {
                without_gil([&] { map.find(keys_of(keys), at<int64_t>(rows), threads); });
            },
            arg("keys"), arg("rows"), arg("threads"))
        .def("add", &add, arg("keys"), arg("rows"), arg("undo").none(true), arg("threads"))
        .def(
            "undo", [](IdMap& map, IdMap::Undo& undo) { without_gil([&] { map.undo(undo); }); }, arg("undo"))
        .def("renewed",
             [](const IdMap& map) { return buffer_of(map.renewed().data(), map.renewed().size() * sizeof(int64_t)); })
        .def("cursor",
             [](const IdMap& map) {
                 const IdMap::Cursor cursor = map.cursor();
                 return py::make_tuple(cursor.used, cursor.clock, cursor.probation_used, cursor.cursor);
             })
        .def("bytes", &IdMap::bytes)
        .def(
            "changed",
            [](const IdMap& map, bool on_probation, const CursorTuple& since, int64_t first, int64_t end) {
                const auto cells = without_gil([&] { return map.changed(on_probation, cursor_of(since), first, end); });
                return buffer_of(cells.data(), cells.size() * sizeof(int32_t));
            },
            arg("on_probation"), arg("since"), arg("first"), arg("end"))
        .def("text_bytes", &text_bytes, arg("on_probation"), arg("cells"), arg("count"))
        .def("save", &save, arg("on_probation"), arg("cells"), arg("count"), arg("to"))
        .def("restore", &restore, arg("cursor"), arg("rows"), arg("probation"));
    module.def("add_to_maps", &add_to_maps, arg("batches"), arg("rows"), arg("threads"));
    module.def(
        "hash_texts",
        [](uintptr_t bytes, uintptr_t offsets, int64_t count, uintptr_t out, int threads) {
            without_gil([&] {
                hash_texts(at<const char>(bytes), at<const int64_t>(offsets), count, at<uint64_t>(out), threads);
            });
        },
        arg("bytes"), arg("offsets"), arg("count"), arg("out"), arg("threads"));
    module.def("texts_of", &texts_of, arg("strings"));
    module.def("texts_of_fixed", &texts_of_fixed, arg("strings"), arg("count"), arg("width"), arg("ucs4"));
}

}  // namespace speedswap
