// Products of woven weights by each level of instructions, on one thread, without a model.
//
//   products check        compare the levels of this CPU with plain C++, and that with exact sums;
//                         rows that are unpacked with those of libllama
//   products bits         numbers for the inputs, quantised columns and results that plain C++ has of
//                         each type, which other CPUs must have, too: tests/native/kernels/test_arm64.py
//   products speed [MB]   G operations/s, and GB/s of weights, by type, columns and level, beside
//                         libllama's; a line of JSON each. MB of weights, more than the caches
//                         have (64)
//
// benchmarks/kernels.py and tests/native/kernels/test_woven.py compile it. With PLR_EMULATED it
// includes that file, in which another CPU's instructions are emulated; then it measures nothing.
#ifdef PLR_EMULATED
#include PLR_EMULATED
#endif

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "kernels/woven_levels.h"

namespace {

using woven::Columns;
using woven::Kind;
using woven::Level;

std::mt19937 random_numbers{1};

double uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(random_numbers);
}

template <class T>
T * aligned(std::vector<T> & memory) {  // to 64 bytes, which it has behind its end
    return reinterpret_cast<T *>((uintptr_t(memory.data()) + 63) / 64 * 64);
}

// ---------------------------------------------------------------------------------------------

// Where a type has half floats, which random bytes would make infinite.
struct Halves {
    ggml_type type;
    int       first, n;
};

constexpr Halves kHalves[] = {
    {GGML_TYPE_Q4_0, 0, 1},   {GGML_TYPE_Q4_1, 0, 2},   {GGML_TYPE_Q5_0, 0, 1}, {GGML_TYPE_Q5_1, 0, 2},
    {GGML_TYPE_Q8_0, 0, 1},   {GGML_TYPE_Q4_K, 0, 2},   {GGML_TYPE_Q5_K, 0, 2}, {GGML_TYPE_Q6_K, 208, 1},
    {GGML_TYPE_Q2_K, 80, 2},  {GGML_TYPE_Q3_K, 108, 1}, {GGML_TYPE_IQ4_NL, 0, 1},
    {GGML_TYPE_IQ4_XS, 0, 1}, {GGML_TYPE_MXFP4, 0, 0},
};

enum Pattern { RANDOM, ALL_ONES, ALL_ZEROS, N_PATTERNS };

std::vector<uint8_t> weights_of(ggml_type type, int n_values, Pattern pattern) {
    const size_t         n_bytes = ggml_type_size(type);
    std::vector<uint8_t> bytes(n_bytes * (n_values / ggml_blck_size(type)));
    for (uint8_t & byte : bytes) {
        byte = pattern == RANDOM ? uint8_t(random_numbers()) : pattern == ALL_ONES ? 0xff : 0;
    }
    const auto * place = std::find_if(std::begin(kHalves), std::end(kHalves),
                                      [&](const Halves & one) { return one.type == type; });
    if (place == std::end(kHalves)) {
        std::printf("%s: say where its half floats are\n", ggml_type_name(type));
        std::exit(1);
    }
    for (size_t block = 0; block < bytes.size(); block += n_bytes) {
        for (int i = 0; i < place->n; ++i) {
            const ggml_fp16_t half = ggml_fp32_to_fp16(float(uniform(-0.1, 0.1)));
            std::memcpy(&bytes[block + place->first + 2 * i], &half, sizeof(half));
        }
        if (type == GGML_TYPE_MXFP4) {
            bytes[block] = pattern == ALL_ZEROS ? 0 : uint8_t(uniform(100, 130));
        }
    }
    return bytes;
}

// Columns of all sizes and of equal numbers, whose integers are the largest.
std::vector<float> columns_of(int n_values, int n_columns) {
    std::vector<float> values(size_t(n_values) * n_columns);
    for (size_t i = 0; i < values.size(); ++i) {
        const int    column = int(i / n_values);
        const double part = uniform(-1, 1), power = uniform(-10, 10);  // in this order everywhere
        values[i] = column % 3 == 0 ? (random_numbers() & 1 ? 1.5f : -1.5f)
                    : column % 3 == 1 ? 2.0f
                                      : float(std::ldexp(part, int(power)));
    }
    return values;
}

struct Packed {
    std::vector<char> memory;
    Columns           columns;

    Packed(const Level & level, const std::vector<float> & values, int n_values)
        : memory((values.size() / n_values + woven::kBehind) * Columns::bytes(n_values / woven::kBlock) + 64),
          columns{aligned(memory), n_values / woven::kBlock} {
        for (int c = 0; c < int(values.size()) / n_values; ++c) {
            level.pack(columns, c, 0, columns.n_blocks, values.data() + size_t(c) * n_values);
        }
    }
};

// Sixteen rows, woven.
std::vector<uint8_t> woven_rows(const Kind & kind, const std::vector<uint8_t> & weights, int n_values) {
    const size_t         n_bytes  = ggml_type_size(kind.type);
    const int            n_blocks = n_values / ggml_blck_size(kind.type);
    std::vector<uint8_t> memory(size_t(n_blocks) * kind.n_bytes + 4096);
    for (int i = 0; i < n_blocks; ++i) {
        const char * rows[woven::kRows];
        for (int r = 0; r < woven::kRows; ++r) {
            rows[r] = reinterpret_cast<const char *>(&weights[(size_t(r) * n_blocks + i) * n_bytes]);
        }
        kind.weave(rows, memory.data() + size_t(i) * kind.n_bytes);
    }
    return memory;
}

std::vector<float> floats_of(const Kind & kind, const std::vector<uint8_t> & weights, int n_values) {
    std::vector<float> rows(size_t(n_values) * woven::kRows);
    ggml_get_type_traits(kind.type)->to_float(weights.data(), rows.data(), int64_t(rows.size()));
    return rows;
}

// What a product should be, and the sum of sizes in it.
struct Exact {
    double sum = 0, sizes = 0;
};

// Of 16 rows and columns, whose value *k* is value(c, k).
template <class Value>
std::vector<Exact> exact(const std::vector<float> & rows, int n_columns, Value && value) {
    const int          n_values = int(rows.size()) / woven::kRows;
    std::vector<Exact> all(size_t(woven::kRows) * n_columns);
    for (int i = 0; i < woven::kRows * n_columns; ++i) {
        const int c = i / woven::kRows, r = i % woven::kRows;
        for (int k = 0; k < n_values; ++k) {
            const double product = rows[size_t(r) * n_values + k] * value(c, k);
            all[i].sum += product, all[i].sizes += std::fabs(product);
        }
    }
    return all;
}

// The largest error of *out*, as a part of the sums of sizes.
double error(const std::vector<Exact> & all, const std::vector<float> & out) {
    double largest = 0;
    for (size_t i = 0; i < out.size(); ++i) {
        largest = std::max(largest, std::fabs(all[i].sum - out[i]) / (all[i].sizes + 1e-30));
    }
    return largest;
}

// Whether rows that are unpacked of woven ones have the bits of *floats*.
bool has_rows(const Kind & kind, const std::vector<uint8_t> & memory, const std::vector<float> & floats) {
    const int          n_values = int(floats.size()) / woven::kRows;
    std::vector<float> row(n_values);
    for (int r = 0; kind.unpack != nullptr && r < woven::kRows; ++r) {
        kind.unpack(memory.data(), r, n_values / woven::kBlock, row.data());
        if (!std::equal(row.begin(), row.end(), floats.begin() + r * n_values)) {
            return false;
        }
    }
    return true;
}

// Columns as bfloat16, for the tiles of *many*.
struct PackedMany {
    std::vector<char>    memory;
    std::vector<int32_t> places;
    woven::Bf16Columns   columns;

    PackedMany(const woven::Many & many, const std::vector<float> & values, int n_values)
        : memory(woven::Bf16Columns::bytes(n_values / woven::kBlock, values.size() / n_values) + 64),
          places(values.size() / n_values),
          columns{aligned(memory), n_values / woven::kBlock, int(places.size())} {
        for (int c = 0; c < columns.n_columns; ++c) {
            places[c] = c;
            many.pack(columns, c, values.data() + size_t(c) * n_values);
        }
    }
};

// The largest error of any number of columns that begin anywhere, where those of experts are scattered.
double error_of_many(const woven::Many & many, size_t index, Pattern pattern) {
    const Kind & kind     = woven::kKinds[index];
    const int    n_values = kind.n_blocks == 1 ? 2080 : 2304;  // more than are unpacked at once
    const int    n_columns = 67;
    const auto   weights   = weights_of(kind.type, woven::kRows * n_values, pattern);
    const auto   memory    = woven_rows(kind, weights, n_values);
    const auto   values    = columns_of(n_values, n_columns);
    const auto   sums      = exact(floats_of(kind, weights, n_values), n_columns,
                                 [&](int c, int k) { return values[size_t(c) * n_values + k]; });
    PackedMany   packed(many, values, n_values);
    double       worst = 0;
    for (const bool are_scattered : {false, true}) {
        for (int c = 0; are_scattered && c < n_columns; ++c) {
            packed.places[c] = c + c / 7;
        }
        for (int n = 1; n <= n_columns; ++n) {
            // The same 16 rows as several groups, the last of which has 7.
            constexpr int      n_rows = 4 * woven::kRows + 7;
            std::vector<float> out(size_t(n_rows) * 2 * n_columns, NAN);
            const int          first = n_columns - n;
            many.tiles[index](memory.data(), 0, n_rows, packed.columns, first, &packed.places[first], n,
                              out.data(), n_rows);
            for (int c = first; c < n_columns; ++c) {
                for (int row = 0; row < n_rows; ++row) {
                    const Exact & one  = sums[c * woven::kRows + row % woven::kRows];
                    const float   here = out[size_t(packed.places[c]) * n_rows + row];
                    const double error = std::fabs(one.sum - here) / (one.sizes + 1e-30);
                    worst              = std::max(worst, std::isfinite(here) ? error : 1e30);
                }
            }
            // Nothing is written anywhere else.
            const auto n_written = std::count_if(out.begin(), out.end(), [](float x) { return !std::isnan(x); });
            worst                = n_written == n_rows * n ? worst : 1e30;
        }
    }
    return worst;
}

int check() {
    constexpr int n_columns = woven::kMostColumns;
    int           n_wrong   = 0;
    for (const Level & level : woven::kLevels) {
        if (!level.is_usable()) {
            continue;
        }
        std::vector<float> odd(8 * woven::kBlock, 0.0f);
        odd[0] = NAN, odd[40] = INFINITY, odd[70] = -INFINITY, odd[100] = 1e-42f, odd[140] = 3e38f;
        const Packed ours(level, odd, woven::kBlock), plain(woven::kLevels[0], odd, woven::kBlock);
        const size_t n_bytes = 8 * Columns::bytes(1);
        const bool   is_same = std::memcmp(ours.columns.data, plain.columns.data, n_bytes) == 0;
        std::printf("%-10s %-7s %s\n", level.name, "columns", is_same ? "same bits" : "WRONG");
        n_wrong += !is_same;
    }
    for (size_t index = 0; index < woven::kKinds.size(); ++index) {
        const Kind & kind         = woven::kKinds[index];
        const int    n_values     = kind.n_blocks == 1 ? 832 : 768;  // 26 blocks: some are left of eights
        bool         has_all_rows = true;
        for (const Level & level : woven::kLevels) {
            double worst   = 0;
            bool   is_same = true;
            for (int pattern = 0; level.is_usable() && pattern < N_PATTERNS; ++pattern) {
                const auto weights =
                    weights_of(kind.type, woven::kRows * n_values, Pattern(pattern));
                const auto   memory = woven_rows(kind, weights, n_values);
                const auto   values = columns_of(n_values, n_columns);
                const Packed ours(level, values, n_values), plain(woven::kLevels[0], values, n_values);
                const auto   floats = floats_of(kind, weights, n_values);
                const auto   sums   = exact(floats, n_columns, [&](int c, int k) {  // of quantised ones
                    return double(ours.columns.d(c)[k / woven::kBlock]) * ours.columns.q(c)[k];
                });
                has_all_rows        = has_all_rows && has_rows(kind, memory, floats);
                // Tiles of all widths, then odd ones behind some of the most columns.
                for (int n = 1; n <= n_columns; n += n < 19 || n == n_columns - 1 ? 1 : 2) {
                    std::vector<float> out[2];
                    for (auto & one : out) {
                        one.assign(size_t(woven::kRows) * n, NAN);
                    }
                    level.tiles[index](memory.data(), ours.columns, 0, n, out[0].data(), woven::kRows,
                                       woven::kRows);
                    woven::kLevels[0].tiles[index](memory.data(), plain.columns, 0, n, out[1].data(),
                                                   woven::kRows, woven::kRows);
                    is_same = is_same && std::memcmp(out[0].data(), out[1].data(),
                                                     out[0].size() * sizeof(float)) == 0;
                    worst = std::max(worst, error(sums, out[0]));
                }
            }
            if (level.is_usable()) {
                const bool is_right = is_same && worst < 2e-6;
                std::printf("%-10s %-7s error %.1e, %s\n", level.name, ggml_type_name(kind.type), worst,
                            is_right ? "same bits" : is_same ? "WRONG" : "OTHER BITS");
                n_wrong += !is_right;
            }
            if (level.is_usable() && level.many != nullptr) {
                double worst_of_many = 0;
                for (int pattern = 0; pattern < N_PATTERNS; ++pattern) {
                    worst_of_many = std::max(worst_of_many, error_of_many(*level.many, index, Pattern(pattern)));
                }
                const bool is_right = worst_of_many < 1.0 / 256 + 1e-5;  // half of 2^-8 of both
                std::printf("%-10s %-7s many columns, error %.1e, %s\n", level.name, ggml_type_name(kind.type),
                            worst_of_many, is_right ? "rounded to bfloat16" : "WRONG");
                n_wrong += !is_right;
            }
        }
        std::printf("%-10s %-7s %s\n", "rows", ggml_type_name(kind.type), has_all_rows ? "same bits" : "WRONG");
        n_wrong += !has_all_rows;
    }
    return n_wrong > 0;
}

// FNV-1a of bytes.
struct Digest {
    uint64_t value = 0xcbf29ce484222325;

    template <class T>
    void add(const T * from, size_t n) {
        for (size_t i = 0; i < n * sizeof(T); ++i) {
            value = (value ^ reinterpret_cast<const uint8_t *>(from)[i]) * 0x100000001b3;
        }
    }
};

int bits() {
    constexpr int n_values = 768, n_columns = 7;
    const Level & plain = woven::kLevels[0];
    for (size_t index = 0; index < woven::kKinds.size(); ++index) {
        const Kind & kind = woven::kKinds[index];
        Digest       inputs, columns, results;
        for (int pattern = 0; pattern < N_PATTERNS; ++pattern) {
            const auto   weights = weights_of(kind.type, woven::kRows * n_values, Pattern(pattern));
            const auto   memory  = woven_rows(kind, weights, n_values);
            const auto   values  = columns_of(n_values, n_columns);
            const Packed packed(plain, values, n_values);
            inputs.add(weights.data(), weights.size());
            inputs.add(values.data(), values.size());
            for (int c = 0; c < n_columns; ++c) {
                columns.add(packed.columns.d(c), 2 * packed.columns.n_blocks);
                columns.add(packed.columns.half_sums(c), 2 * packed.columns.n_blocks);
                columns.add(packed.columns.q(c), n_values);
            }
            std::vector<float> out(size_t(woven::kRows) * n_columns), row(n_values);
            plain.tiles[index](memory.data(), packed.columns, 0, n_columns, out.data(), woven::kRows,
                               woven::kRows);
            results.add(memory.data(), memory.size());
            results.add(out.data(), out.size());
            for (int r = 0; kind.unpack != nullptr && r < woven::kRows; ++r) {
                kind.unpack(memory.data(), r, n_values / woven::kBlock, row.data());
                results.add(row.data(), row.size());
            }
        }
        std::printf("%-10s", ggml_type_name(kind.type));
        for (const Digest & one : {inputs, columns, results}) {
            std::printf(" %016llx", static_cast<unsigned long long>(one.value));
        }
        std::printf("\n");
    }
    return 0;
}

// ---------------------------------------------------------------------------------------------
#ifndef PLR_EMULATED

// CPU time of this thread, which other programs do not lengthen.
double seconds() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

// Seconds of the fastest run of *work*, of several within a third of a second.
template <class Work>
double fastest(Work && work) {
    double best = 1e30;
    work();
    for (double end = seconds() + 0.3, start; (start = seconds()) < end;) {
        work();
        best = std::min(best, seconds() - start);
    }
    return best;
}

// Buffers in which libllama keeps weights in an order of its own: repacked, or for AMX.
std::vector<ggml_backend_buffer_type_t> own_orders() {
    std::vector<ggml_backend_buffer_type_t> types;
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    auto               get    = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device),
                                          "ggml_backend_dev_get_extra_bufts"));
    for (auto * type = get != nullptr ? get(device) : nullptr; type != nullptr && *type != nullptr; ++type) {
        types.push_back(*type);
    }
    return types;
}

// Seconds of a product by libllama, of weights in buffers of *type*; 0: it has none of them.
double libllama(ggml_backend_buffer_type_t type, const Kind & kind, int n_values, int n_rows,
                int n_columns, const std::vector<uint8_t> & bytes) {
    ggml_backend_t         backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    const ggml_init_params params  = {16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true};
    ggml_context *         of_rows = ggml_init(params);
    ggml_context *         others  = ggml_init(params);
    ggml_backend_cpu_set_n_threads(backend, 1);
    ggml_tensor *         rows   = ggml_new_tensor_2d(of_rows, kind.type, n_values, n_rows);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors_from_buft(of_rows, type);
    ggml_tensor *         columns = ggml_new_tensor_2d(others, GGML_TYPE_F32, n_values, n_columns);
    ggml_tensor *         out     = ggml_mul_mat(others, rows, columns);
    double                time    = 0;
    if (ggml_backend_supports_op(backend, out) &&
        (type == ggml_backend_cpu_buffer_type() || rows->extra != nullptr)) {
        ggml_backend_buffer_t memory = ggml_backend_alloc_ctx_tensors(others, backend);
        ggml_backend_tensor_set(rows, bytes.data(), 0, ggml_nbytes(rows));
        const auto values = columns_of(n_values, n_columns);
        ggml_backend_tensor_set(columns, values.data(), 0, ggml_nbytes(columns));
        ggml_cgraph * graph = ggml_new_graph(others);
        ggml_build_forward_expand(graph, out);
        time = fastest([&] { ggml_backend_graph_compute(backend, graph); });
        ggml_backend_buffer_free(memory);
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(of_rows), ggml_free(others);
    ggml_backend_free(backend);
    return time;
}

int speed(size_t n_bytes) {
    constexpr int n_values = 4096;
    for (size_t index = 0; index < woven::kKinds.size(); ++index) {
        const Kind & kind = woven::kKinds[index];
        std::vector<uint8_t> bytes(n_bytes + 4096);
        for (uint8_t & byte : bytes) {  // small as half floats, but no denormal result as exponents
            byte = uint8_t((random_numbers() & 0x3f) | (kind.type == GGML_TYPE_MXFP4 ? 0x40 : 0));
        }
        for (const int n_columns : {1, 4, 8, 32, 128}) {
            const size_t row    = ggml_row_size(kind.type, n_values);
            const int    n_rows = int(n_bytes / row / (n_columns > 4 ? 16 : 1) / 64 * 64);  // as AMX of libllama wants them
            const auto   say    = [&](const char * who, double time) {
                if (time > 0) {
                    const double n = 2.0 * n_values * n_rows * n_columns;
                    std::printf("{\"type\": \"%s\", \"columns\": %d, \"by\": \"%s\", \"gop_per_s\": %.1f, "
                                "\"gb_per_s\": %.1f}\n",
                                ggml_type_name(kind.type), n_columns, who, n / time / 1e9,
                                double(row) * n_rows / time / 1e9);
                    std::fflush(stdout);
                }
            };
            const size_t group = size_t(n_values / woven::kBlock / kind.n_blocks) * kind.n_bytes;
            const int    n_groups = int(std::min(n_bytes / group, size_t(n_rows / 16)));
            const auto   values   = columns_of(n_values, n_columns);
            std::vector<float> out(size_t(n_rows) * n_columns);
            for (size_t i = 1; i < std::size(woven::kLevels); ++i) {
                const Level & level = woven::kLevels[i];
                if (!level.is_usable()) {
                    continue;
                }
                if (level.many != nullptr && n_columns >= level.many->from) {
                    const woven::Many & many = *level.many;
                    const double        time = fastest([&] {
                        const PackedMany packed(many, values, n_values);
                        const int        n = many.at_once(n_columns, packed.columns.n_blocks);
                        for (int c = 0; c < n_columns; c += n) {
                            many.tiles[index](bytes.data(), group, 16 * n_groups, packed.columns, c,
                                              &packed.places[c], std::min(n, n_columns - c), out.data(), n_rows);
                        }
                    });
                    say(level.name, time * n_rows / (16.0 * n_groups));
                    continue;
                }
                const double time = fastest([&] {
                    const Packed packed(level, values, n_values);
                    for (int first = 0; first < n_columns; first += woven::kMostColumns) {
                        for (int g = 0; g < n_groups; ++g) {
                            level.tiles[index](bytes.data() + g * group, packed.columns, first,
                                                 std::min(first + woven::kMostColumns, n_columns), &out[16 * g], n_rows, 16);
                        }
                    }
                });
                say(level.name, time * n_rows / (16.0 * n_groups));
            }
            say("libllama", libllama(ggml_backend_cpu_buffer_type(), kind, n_values, n_rows, n_columns, bytes));
            for (ggml_backend_buffer_type_t type : own_orders()) {
                const std::string who = std::string("libllama ") + ggml_backend_buft_name(type);
                say(who.c_str(), libllama(type, kind, n_values, n_rows, n_columns, bytes));
            }
        }
    }
    return 0;
}
#endif

}  // namespace

int main(int argc, char ** argv) {
    const std::string what = argc > 1 ? argv[1] : "";
#ifndef PLR_EMULATED
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    ggml_backend_load_all();
    if (what == "speed") {
        return speed(size_t(argc > 2 ? std::atoi(argv[2]) : 64) << 20);
    }
#endif
    if (what == "check" || what == "bits") {
        return what == "check" ? check() : bits();
    }
    std::fprintf(stderr, "products check | bits | speed [MB]\n");
    return 2;
}
