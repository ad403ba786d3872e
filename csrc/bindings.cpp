// speedswap.kernels._C: the CPU loops for Python. Pointers are integers, the caller keeps the memory alive, and the
// interpreter lock is released while the loops run.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "adagrad.h"
#include "background.h"
#include "id_map_bindings.h"
#include "idle.h"
#include "lines.h"
#include "pages.h"
#include "pairs.h"
#include "pointer.h"
#include "pool.h"
#include "row_log_bindings.h"
#include "rows_cpu.h"
#include "segments.h"
#include "signals.h"
#include "staging_bindings.h"
#include "vector_bindings.h"
#include "without_gil.h"

namespace py = pybind11;

namespace {

using speedswap::at;
using speedswap::Buffer;
using speedswap::FeatureIds;
using speedswap::Fill;
using speedswap::Form;
using speedswap::Ids;
using speedswap::Job;
using speedswap::Move;
using speedswap::Part;
using speedswap::PrefetchJob;
using speedswap::without_gil;
using speedswap::WriteJob;
// block, offset, width, block_stride; and for converted columns form, stochastic, key.
using CopiedPart = std::tuple<uintptr_t, int64_t, int64_t, int64_t>;
using ConvertedPart = std::tuple<uintptr_t, int64_t, int64_t, int64_t, int, bool, uint64_t>;
using PartTuple = std::variant<CopiedPart, ConvertedPart>;

void require(bool holds, const char* name, int64_t value, const char* wanted) {
    if (!holds) throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", not " + wanted);
}

Ids ids_at(uintptr_t pointer, int64_t count) {
    require(count >= 0, "count", count, "0 or more");
    return {at<const int64_t>(pointer), count};
}

Part part_of(const CopiedPart& tuple) {
    const auto& [block, offset, width, block_stride] = tuple;
    require(width >= 0, "width", width, "0 or more");
    return {offset, width, at(block), block_stride};
}

Part part_of(const ConvertedPart& tuple) {
    const auto& [block, offset, width, block_stride, form, stochastic, key] = tuple;
    const bool int8 = form == int(Form::int8);
    require(int8 || form == int(Form::float16) || form == int(Form::bfloat16), "form", form, "1, 2 or 3");
    require(int8 ? width >= speedswap::kScaleBytes : width >= 0 && width % 2 == 0, "width", width, "that of a row");
    return {offset, width, at(block), block_stride, Form(form), stochastic, key};
}

std::vector<Part> parts_of(const std::vector<PartTuple>& tuples) {
    std::vector<Part> parts;
    for (const PartTuple& tuple : tuples)
        parts.push_back(std::visit([](const auto& some) { return part_of(some); }, tuple));
    return parts;
}

void gather(uintptr_t records, int64_t stride, uintptr_t ids, int64_t count, const std::vector<PartTuple>& parts,
            int threads) {
    const Ids checked = ids_at(ids, count);
    const std::vector<Part> columns = parts_of(parts);
    without_gil([&] { speedswap::gather(at(records), stride, checked, columns, threads); });
}

void scatter(uintptr_t records, int64_t stride, uintptr_t ids, int64_t count, const std::vector<PartTuple>& parts,
             int threads, int64_t rows_moved) {
    const Ids checked = ids_at(ids, count);
    const std::vector<Part> columns = parts_of(parts);
    without_gil([&] { speedswap::scatter(at(records), stride, checked, columns, threads, rows_moved); });
}

void round_rows(uintptr_t ids, int64_t count, const PartTuple& part, int threads) {
    const Ids checked = ids_at(ids, count);
    const Part column = parts_of({part}).front();
    require(column.form == Form::float16 || column.form == Form::bfloat16, "form", int(column.form), "1 or 2");
    without_gil([&] { speedswap::round_rows(checked, column, threads); });
}

uint64_t rounding_key(uint64_t seed, uint64_t column_key, uint64_t write) {
    return speedswap::rounding_key(seed, column_key, write);
}

int64_t check_ids(uintptr_t ids, int64_t count, int64_t num_rows, int threads) {
    const Ids checked = ids_at(ids, count);
    require(num_rows >= 0, "num_rows", num_rows, "0 or more");
    return without_gil([&] { return speedswap::check_ids(checked, num_rows, threads); });
}

int64_t first_fall(uintptr_t values, int64_t count, int threads) {
    const Ids checked = ids_at(values, count);
    return without_gil([&] { return speedswap::first_fall(checked, threads); });
}

int64_t first_duplicate(uintptr_t ids, int64_t count, int64_t num_rows) {
    const Ids checked = ids_at(ids, count);
    require(num_rows >= 0, "num_rows", num_rows, "0 or more");
    return without_gil([&] { return speedswap::first_duplicate(checked, num_rows); });
}

int64_t last_occurrences(uintptr_t ids, int64_t count, uintptr_t positions) {
    const Ids checked = ids_at(ids, count);
    return without_gil([&] { return speedswap::last_occurrences(checked, at<int64_t>(positions)); });
}

int64_t unique(uintptr_t ids, int64_t count, uintptr_t rows, uintptr_t local, int threads, int64_t num_rows) {
    const Ids given = ids_at(ids, count);
    return without_gil(
        [&] { return speedswap::unique(given, at<int64_t>(rows), at<int64_t>(local), threads, num_rows); });
}

void by_owner(uintptr_t ids, int64_t count, int bits, uint64_t factor, int64_t world_size, uintptr_t ordered,
              uintptr_t places, uintptr_t counts) {
    const Ids checked = ids_at(ids, count);
    require(bits >= 0 && bits < 32, "bits", bits, "0 to 31");
    require(world_size >= 1 && world_size <= int64_t(1) << bits, "world_size", world_size, "1 to 2**bits");
    const speedswap::Owners owners = {bits, factor, world_size};
    without_gil(
        [&] { speedswap::by_owner(checked, owners, at<int64_t>(ordered), at<int64_t>(places), at<int64_t>(counts)); });
}

using FeaturesTuple = std::tuple<int64_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t>;

bool merge_ids(uintptr_t ids, int64_t count, int item_bytes, const FeaturesTuple& features, uintptr_t rows,
               int64_t num_rows, int threads) {
    require(item_bytes == 4 || item_bytes == 8, "item_bytes", item_bytes, "4 or 8");
    const auto [num_features, begins, counts, bases, limits] = features;
    const FeatureIds given = {at<const void>(ids),
                              count,
                              item_bytes,
                              num_features,
                              at<const int64_t>(begins),
                              at<const int64_t>(counts),
                              at<const int64_t>(bases),
                              at<const int64_t>(limits)};
    return without_gil([&] { return speedswap::merge_ids(given, at<int64_t>(rows), num_rows, threads); });
}

template <void (*fill)(const Fill&, int)>
void fill_rows(uintptr_t out, int64_t row_stride, int64_t first_row, int64_t num_rows, int64_t width, int item_bytes,
               double a, double b, uint64_t seed, uint64_t column_key, int threads, uintptr_t rows) {
    require(item_bytes == 4 || item_bytes == 8, "item_bytes", item_bytes, "4 (float) or 8 (double)");
    require(first_row >= 0, "first_row", first_row, "0 or more");
    require(num_rows >= 0, "num_rows", num_rows, "0 or more");
    require(width >= 0, "width", width, "0 or more");
    without_gil([&] {
        fill({at(out), row_stride, first_row, num_rows, width, item_bytes, a, b, seed, column_key, at<int64_t>(rows)},
             threads);
    });
}

using speedswap::Factors;
using speedswap::Layout;
using speedswap::Matrix;
using speedswap::Segments;
using SegmentsTuple = std::tuple<uintptr_t, uintptr_t, int64_t>;
using MatrixTuple = std::tuple<uintptr_t, int64_t, int64_t>;

Segments segments_of(const SegmentsTuple& tuple) {
    const auto [index, offsets, num_segments] = tuple;
    require(num_segments >= 0, "num_segments", num_segments, "0 or more");
    return {at<const int64_t>(index), at<const int64_t>(offsets), num_segments};
}

Matrix matrix_of(const MatrixTuple& tuple, int item_bytes) {
    const auto [data, stride, width] = tuple;
    require(item_bytes == 4 || item_bytes == 8, "item_bytes", item_bytes, "4 (float) or 8 (double)");
    require(width >= 0, "width", width, "0 or more");
    return {at(data), stride, width, item_bytes};
}

void group(uintptr_t local, int64_t count, int64_t num_rows, uintptr_t order, uintptr_t offsets) {
    require(num_rows >= 0, "num_rows", num_rows, "0 or more");
    without_gil(
        [&] { speedswap::group(at<const int64_t>(local), count, num_rows, at<int64_t>(order), at<int64_t>(offsets)); });
}

void sum_rows(uintptr_t local, int64_t count, int64_t num_rows, const MatrixTuple& values, const MatrixTuple& sums,
              int item_bytes, int threads) {
    require(num_rows >= 0, "num_rows", num_rows, "0 or more");
    const Matrix from = matrix_of(values, item_bytes), to = matrix_of(sums, item_bytes);
    without_gil([&] { speedswap::sum_rows(at<const int64_t>(local), count, num_rows, from, to, threads); });
}

using FactorsTuple = std::tuple<uintptr_t, uintptr_t>;
using LayoutTuple = std::tuple<int64_t, int64_t>;

Factors factors_of(const FactorsTuple& tuple) {
    const auto [weights, divisors] = tuple;
    return {at<const void>(weights), at<const void>(divisors)};
}

Layout layout_of(const LayoutTuple& tuple) {
    const auto [samples, step] = tuple;
    require(samples >= 1, "samples", samples, "1 or more");
    return {samples, step};
}

void sum_segments(const SegmentsTuple& segments, const MatrixTuple& values, const FactorsTuple& factors,
                  const LayoutTuple& layout, const MatrixTuple& out, int item_bytes, int threads) {
    const Segments over = segments_of(segments);
    const Matrix from = matrix_of(values, item_bytes), to = matrix_of(out, item_bytes);
    const Factors times = factors_of(factors);
    const Layout places = layout_of(layout);
    without_gil([&] { speedswap::sum_segments(over, from, times, places, to, threads); });
}

int64_t sum_segments_back(const SegmentsTuple& segments, const MatrixTuple& values, const FactorsTuple& factors,
                          const LayoutTuple& layout, const MatrixTuple& sums, int64_t num_rows, int item_bytes,
                          int threads) {
    const Segments over = segments_of(segments);
    const Matrix from = matrix_of(values, item_bytes), to = matrix_of(sums, item_bytes);
    const Factors times = factors_of(factors);
    const Layout places = layout_of(layout);
    require(num_rows >= 0, "num_rows", num_rows, "0 or more");
    require(over.offsets[0] == 0, "offsets[0]", over.offsets[0], "0");  // an entry before it would have no segment
    return without_gil([&] { return speedswap::sum_segments_back(over, from, times, places, to, num_rows, threads); });
}

void dot_segments(const SegmentsTuple& segments, const MatrixTuple& values, const MatrixTuple& others,
                  uintptr_t products, int item_bytes, int threads) {
    const Segments over = segments_of(segments);
    const Matrix left = matrix_of(values, item_bytes), right = matrix_of(others, item_bytes);
    without_gil([&] { speedswap::dot_segments(over, left, right, at<void>(products), threads); });
}

void max_segments(const SegmentsTuple& segments, const MatrixTuple& values, const MatrixTuple& out, uintptr_t taken,
                  int item_bytes, int threads) {
    const Segments over = segments_of(segments);
    const Matrix from = matrix_of(values, item_bytes), to = matrix_of(out, item_bytes);
    without_gil([&] { speedswap::max_segments(over, from, to, at<int64_t>(taken), threads); });
}

void sum_taken(const SegmentsTuple& segments, uintptr_t entries, const MatrixTuple& values, uintptr_t taken,
               const MatrixTuple& out, int item_bytes, int threads) {
    const Segments over = segments_of(segments);
    const Matrix from = matrix_of(values, item_bytes), to = matrix_of(out, item_bytes);
    without_gil(
        [&] { speedswap::sum_taken(over, at<const int64_t>(entries), from, at<const int64_t>(taken), to, threads); });
}

speedswap::Samples samples_at(uintptr_t first, uintptr_t rest, int64_t count, int64_t others, int64_t width) {
    require(count >= 0, "count", count, "0 or more");
    require(others >= 0, "others", others, "0 or more");
    require(width >= 0, "width", width, "0 or more");
    return {at<const float>(first), at<const float>(rest), count, others, width};
}

void pair_products(uintptr_t first, uintptr_t rest, int64_t count, int64_t others, int64_t width, uintptr_t out,
                   int threads) {
    const speedswap::Samples samples = samples_at(first, rest, count, others, width);
    without_gil([&] { speedswap::pair_products(samples, at<float>(out), threads); });
}

void pair_gradients(uintptr_t first, uintptr_t rest, int64_t count, int64_t others, int64_t width, uintptr_t grad,
                    uintptr_t grad_first, uintptr_t grad_rest, int threads) {
    const speedswap::Samples samples = samples_at(first, rest, count, others, width);
    without_gil([&] {
        speedswap::pair_gradients(samples, at<const float>(grad), at<float>(grad_first), at<float>(grad_rest), threads);
    });
}

void take_idle_steps(const std::vector<uintptr_t>& columns, int64_t width, int item_bytes, uintptr_t last, int32_t now,
                     int32_t before, bool bends, uintptr_t steps, int64_t count, int threads) {
    const int64_t most = speedswap::kMostIdleColumns, held = int64_t(columns.size());
    require(held >= 1 && held <= most, "columns", held, "1 to 4");
    require(item_bytes == 4 || item_bytes == 8, "item_bytes", item_bytes, "4 (float) or 8 (double)");
    speedswap::IdleRows idle = {
        {}, int(held), width, item_bytes, at<const int32_t>(last), now, before, bends, at<const double>(steps)};
    for (size_t i = 0; i < columns.size(); ++i)
        idle.columns[i] = at(columns[i]);
    without_gil([&] { speedswap::take_idle_steps(idle, count, threads); });
}

// `rows` is the structure that the kernel takes.
void step_adagrad(const std::string& rows, int threads) {
    speedswap::AdagradRows step;
    require(rows.size() == sizeof step, "rows", int64_t(rows.size()), "an AdagradRows");
    std::memcpy(&step, rows.data(), sizeof step);
    without_gil([&] { speedswap::step_adagrad(step, threads); });
}

std::tuple<int64_t, int64_t, int64_t, bool> read_lines(const py::buffer& text, int64_t first, const std::string& bases,
                                                       uintptr_t missing, uintptr_t values, int64_t stride,
                                                       int64_t most) {
    const py::buffer_info bytes = text.request();
    const int64_t size = bytes.size * bytes.itemsize;
    require(first >= 0 && first <= size, "first", first, "in the text");
    require(most >= 0 && most <= stride, "most", most, "0 to stride");
    const speedswap::Lines read = without_gil([&] {
        return speedswap::read_lines(static_cast<const char*>(bytes.ptr) + first, size - first, bases,
                                     at<const int64_t>(missing), at<int64_t>(values), stride, most);
    });
    return {read.rows, read.bytes, read.lines, read.wrong};
}

// ---- the background thread -----------------------------------------------------------------------------------------

using MoveTuple = std::tuple<uintptr_t, int64_t, std::vector<PartTuple>>;

std::vector<Move> moves_of(const std::vector<MoveTuple>& tuples) {
    std::vector<Move> moves;
    for (const auto& [records, stride, parts] : tuples)
        moves.push_back({at(records), stride, parts_of(parts)});
    return moves;
}

std::shared_ptr<PrefetchJob> prefetch(uintptr_t ids, int64_t count, int64_t num_rows,
                                      const std::vector<MoveTuple>& moves, int threads) {
    require(num_rows >= 0, "num_rows", num_rows, "0 or more");
    auto job = std::make_shared<PrefetchJob>(ids_at(ids, count), num_rows, moves_of(moves));
    speedswap::queue(job, threads);
    return job;
}

std::shared_ptr<WriteJob> queue_scatter(uintptr_t ids, int64_t count, const std::vector<MoveTuple>& moves,
                                        int threads) {
    auto job = std::make_shared<WriteJob>(ids_at(ids, count), moves_of(moves));
    speedswap::queue(job, threads);
    return job;
}

int64_t forward(uintptr_t from_rows, int64_t from_count, uintptr_t to_rows, int64_t to_count,
                const std::vector<std::tuple<uintptr_t, PartTuple>>& columns, int threads) {
    std::vector<speedswap::Forwarded> forwarded;
    for (const auto& [from, to] : columns) {
        forwarded.push_back({at(from), parts_of({to}).front()});
        require(forwarded.back().to.form != Form::int8, "form", int(forwarded.back().to.form), "0, 1 or 2");
    }
    return without_gil([&] {
        return speedswap::forward(at<int64_t>(from_rows), from_count, at<int64_t>(to_rows), to_count, forwarded,
                                  threads);
    });
}

void read_ahead(uintptr_t first, int64_t row_bytes, uintptr_t rows, int64_t count, int threads) {
    const Ids checked = ids_at(rows, count);
    without_gil([&] { speedswap::read_ahead(at(first), row_bytes, checked.data, count, threads); });
}

void decode_rows(uintptr_t values, int64_t width, uintptr_t scales, bool exponents, int64_t scales_per_row,
                 std::pair<int64_t, int64_t> tile, uintptr_t rows, int64_t count, uintptr_t out, bool bfloat16,
                 int threads) {
    const Ids checked = ids_at(rows, count);
    require(width > 0, "width", width, "1 or more");
    const speedswap::Float8Rows from{at(values), width, at(scales), exponents, scales_per_row, tile.first, tile.second};
    without_gil([&] { speedswap::decode_rows(from, checked, at(out), bfloat16, threads); });
}

void prefault(uintptr_t pointer, int64_t nbytes, int threads) {
    without_gil([&] { speedswap::prefault(at(pointer), nbytes, threads); });
}

}  // namespace

PYBIND11_MODULE(_C, module) {
    using py::arg;
    module.doc() = "The CPU loops behind speedswap.kernels; csrc/rows_cpu.h documents each function.";
    module.def("isa", &speedswap::isa);
    module.def("gather", &gather, arg("records"), arg("stride"), arg("ids"), arg("count"), arg("parts"),
               arg("threads"));
    module.def("scatter", &scatter, arg("records"), arg("stride"), arg("ids"), arg("count"), arg("parts"),
               arg("threads"), arg("rows_moved") = 0);
    module.def("round_rows", &round_rows, arg("ids"), arg("count"), arg("part"), arg("threads"));
    module.def("rounding_key", &rounding_key, arg("seed"), arg("column_key"), arg("write"));
    module.def("check_ids", &check_ids, arg("ids"), arg("count"), arg("num_rows"), arg("threads"));
    module.def("first_fall", &first_fall, arg("values"), arg("count"), arg("threads"));
    module.def("first_duplicate", &first_duplicate, arg("ids"), arg("count"), arg("num_rows"));
    module.def("last_occurrences", &last_occurrences, arg("ids"), arg("count"), arg("positions"));
    module.def("by_owner", &by_owner, arg("ids"), arg("count"), arg("bits"), arg("factor"), arg("world_size"),
               arg("ordered"), arg("places"), arg("counts"));
    module.def("unique", &unique, arg("ids"), arg("count"), arg("rows"), arg("local"), arg("threads"),
               arg("num_rows") = -1);
    module.def("merge_ids", &merge_ids, arg("ids"), arg("count"), arg("item_bytes"), arg("features"), arg("rows"),
               arg("num_rows"), arg("threads"));
    module.def("fill_uniform", &fill_rows<&speedswap::fill_uniform>, arg("out"), arg("row_stride"), arg("first_row"),
               arg("num_rows"), arg("width"), arg("item_bytes"), arg("low"), arg("high"), arg("seed"),
               arg("column_key"), arg("threads"), arg("rows") = 0);
    module.def("fill_normal", &fill_rows<&speedswap::fill_normal>, arg("out"), arg("row_stride"), arg("first_row"),
               arg("num_rows"), arg("width"), arg("item_bytes"), arg("mean"), arg("std"), arg("seed"),
               arg("column_key"), arg("threads"), arg("rows") = 0);
    module.def("group", &group, arg("local"), arg("count"), arg("num_rows"), arg("order"), arg("offsets"));
    module.def("sum_rows", &sum_rows, arg("local"), arg("count"), arg("num_rows"), arg("values"), arg("sums"),
               arg("item_bytes"), arg("threads"));
    module.def("sum_segments", &sum_segments, arg("segments"), arg("values"), arg("factors"), arg("layout"), arg("out"),
               arg("item_bytes"), arg("threads"));
    module.def("sum_segments_back", &sum_segments_back, arg("segments"), arg("values"), arg("factors"), arg("layout"),
               arg("sums"), arg("num_rows"), arg("item_bytes"), arg("threads"));
    module.def("dot_segments", &dot_segments, arg("segments"), arg("values"), arg("others"), arg("products"),
               arg("item_bytes"), arg("threads"));
    module.def("max_segments", &max_segments, arg("segments"), arg("values"), arg("out"), arg("taken"),
               arg("item_bytes"), arg("threads"));
    module.def("sum_taken", &sum_taken, arg("segments"), arg("entries"), arg("values"), arg("taken"), arg("out"),
               arg("item_bytes"), arg("threads"));
    module.def("pair_products", &pair_products, arg("first"), arg("rest"), arg("count"), arg("others"), arg("width"),
               arg("out"), arg("threads"));
    module.def("pair_gradients", &pair_gradients, arg("first"), arg("rest"), arg("count"), arg("others"), arg("width"),
               arg("grad"), arg("grad_first"), arg("grad_rest"), arg("threads"));
    module.def("take_idle_steps", &take_idle_steps, arg("columns"), arg("width"), arg("item_bytes"), arg("last"),
               arg("now"), arg("before"), arg("bends"), arg("steps"), arg("count"), arg("threads"));
    module.def("step_adagrad", &step_adagrad, arg("rows"), arg("threads"));
    module.def("read_lines", &read_lines, arg("text"), arg("first"), arg("bases"), arg("missing"), arg("values"),
               arg("stride"), arg("most"));
    module.def("read_ahead", &read_ahead, arg("first"), arg("row_bytes"), arg("rows"), arg("count"), arg("threads"));
    module.def("decode_rows", &decode_rows, arg("values"), arg("width"), arg("scales"), arg("exponents"),
               arg("scales_per_row"), arg("tile"), arg("rows"), arg("count"), arg("out"), arg("bfloat16"),
               arg("threads"));
    module.def("prefault", &prefault, arg("pointer"), arg("nbytes"), arg("threads"));

    py::class_<Buffer>(module, "Buffer", py::buffer_protocol())
        .def(py::init([](int64_t nbytes) {
                 require(nbytes >= 0, "nbytes", nbytes, "0 or more");
                 return Buffer(nbytes);
             }),
             arg("nbytes"))
        .def_buffer([](Buffer& buffer) {
            return py::buffer_info(buffer.data(), 1, py::format_descriptor<uint8_t>::format(), buffer.bytes());
        });
    py::class_<Job, std::shared_ptr<Job>>(module, "Job")
        .def(
            "wait", [](Job& job, int threads) { without_gil([&] { job.wait(threads); }); }, arg("threads") = 1)
        .def("done", &Job::done);
    py::class_<PrefetchJob, Job, std::shared_ptr<PrefetchJob>>(module, "PrefetchJob")
        .def_readonly("outside", &PrefetchJob::outside)
        .def_readonly("distinct", &PrefetchJob::distinct)
        .def("take", [](PrefetchJob& job) {
            py::list blocks;
            for (Buffer& block : job.blocks)
                blocks.append(std::move(block));
            job.blocks.clear();
            return py::make_tuple(std::move(job.rows), std::move(job.local), blocks);
        });
    py::class_<WriteJob, Job, std::shared_ptr<WriteJob>>(module, "WriteJob");
    module.def("prefetch", &prefetch, arg("ids"), arg("count"), arg("num_rows"), arg("moves"), arg("threads"));
    module.def("queue_scatter", &queue_scatter, arg("ids"), arg("count"), arg("moves"), arg("threads"));
    module.def("use_own_pool", &speedswap::use_own_pool);
    module.def("drain", [] { without_gil([] { speedswap::drain(); }); });
    module.def("forward", &forward, arg("from_rows"), arg("from_count"), arg("to_rows"), arg("to_count"),
               arg("columns"), arg("threads"));
    speedswap::bind_id_map(module);
    speedswap::bind_row_log(module);
    speedswap::bind_signals(module);
    speedswap::bind_staging(module);
    speedswap::bind_vectors(module);
}
