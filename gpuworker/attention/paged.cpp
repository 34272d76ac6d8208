// Paged attention on a CPU, over one flat mixed batch. native_library.py compiles this file with
// the machine's own compiler. The result must equal reference.py within a tolerance.
//
// A piece of work is (request, some of its queries, KV head). The rows of a piece are these queries
// times the query heads that share the KV head. The kernel walks the context in tiles of 16 keys
// that begin at multiples of 16, and keeps a running maximum, sum and output for each row (online
// softmax). A row's arithmetic is the same sequence of operations whichever other rows are in the
// piece, so a row's bits do not depend on the batch, on chunking or on the number of threads.

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr int kTile = 16;

// Floats per vector register. Wider vectors would also compile, but the compiler then keeps them in
// memory: 16 lanes made prefills 10 times slower on AVX2. Tests set LANES.
#if defined(LANES)
constexpr int kLanes = LANES;
#elif defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
// kParts: vectors per tile of keys. The rest is the register blocking: rows of scores computed at
// once, and rows and vectors of outputs computed at once. Sums take half of the registers.
constexpr int kParts = kTile / kLanes;
constexpr int kScoreRows = kRegisters / (4 * kParts) > 1 ? kRegisters / (4 * kParts) : 2;
constexpr int kOutputRows = kScoreRows > 4 ? 4 : kScoreRows;
constexpr int kOutputVecs = kRegisters / (2 * kOutputRows) > 4 ? 4 : kRegisters / (2 * kOutputRows);

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));

inline Vec load(const float* p) {
  Vec x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

inline void store(float* p, Vec x) { std::memcpy(p, &x, sizeof(x)); }

inline float to_float(float x) { return x; }

inline float to_float(uint16_t bfloat) {
  uint32_t bits = uint32_t(bfloat) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline Vec load(const uint16_t* p) {
  float x[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = to_float(p[i]);
  return load(x);
}

inline void from_float(float x, float* out) { *out = x; }

// Converts to bfloat16, rounding to nearest with ties to even; NaN stays NaN.
inline void from_float(float x, uint16_t* out) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (x != x) {
    *out = 0x7fc0;
    return;
  }
  *out = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Vec splat(float x) { return Vec{} + x; }

// e^x to about one unit in the last place (Cephes' expf); 0 below -87, NaN for NaN.
inline Vec exp(Vec x) {
  const Vec low = splat(-87.0f), high = splat(88.0f);
  IntVec is_zero = x < low;
  x = is_zero ? low : x;
  x = (x > high) ? high : x;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec n = (x * 1.44269504088896341f + magic) - magic;
  Vec r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  Vec y = splat(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  IntVec exponent = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec power;
  std::memcpy(&power, &exponent, sizeof(power));
  Vec result = y * power;
  return is_zero ? splat(0.0f) : result;
}

// tanh from exp, for soft caps. Its absolute error is small, which suffices: the cap scales it.
inline Vec tanh(Vec x) {
  IntVec is_negative = x < splat(0.0f);
  Vec e = exp((is_negative ? x : -x) * 2.0f);
  Vec t = (1.0f - e) / (1.0f + e);
  return is_negative ? -t : t;
}

// The scores or weights of a row: one float for each key of a tile.
struct TileRow {
  Vec parts[kParts];
};

inline float largest(const TileRow& row) {
  Vec most = row.parts[0];
  for (int p = 1; p < kParts; ++p) most = row.parts[p] > most ? row.parts[p] : most;
  float lanes[kLanes];
  store(lanes, most);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
  return lanes[0];
}

// One stage of a transposition: swaps the off-diagonal squares of size S of a pair of rows.
template <int S, int... I>
inline void swap_squares(Vec& a, Vec& b, std::integer_sequence<int, I...>) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_SHUFFLEVECTOR
#endif
#endif
#ifdef HAS_SHUFFLEVECTOR
  Vec upper = __builtin_shufflevector(a, b, (I & S ? kLanes + I - S : I)...);
  Vec lower = __builtin_shufflevector(a, b, (I & S ? kLanes + I : I + S)...);
#else
  Vec upper = __builtin_shuffle(a, b, IntVec{(I & S ? kLanes + I - S : I)...});
  Vec lower = __builtin_shuffle(a, b, IntVec{(I & S ? kLanes + I : I + S)...});
#endif
  a = upper;
  b = lower;
}

template <int S>
inline void transpose_stage(Vec* rows) {
  for (int i = 0; i < kLanes; ++i)
    if (!(i & S)) swap_squares<S>(rows[i], rows[i + S], std::make_integer_sequence<int, kLanes>());
}

// Transposes a square of kLanes rows in place.
inline void transpose(Vec* rows) {
  if constexpr (kLanes > 8) transpose_stage<8>(rows);
  if constexpr (kLanes > 4) transpose_stage<4>(rows);
  transpose_stage<2>(rows);
  transpose_stage<1>(rows);
}

// Scores of R rows against a tile: queries [R, head_dim], keys transposed [head_dim, kTile].
template <int R>
inline void score(const float* queries, const float* keys, int head_dim, TileRow* scores) {
  Vec sums[R][kParts] = {};
  for (int d = 0; d < head_dim; ++d)
    for (int p = 0; p < kParts; ++p) {
      Vec key = load(keys + d * kTile + p * kLanes);
      for (int r = 0; r < R; ++r) sums[r][p] += queries[r * head_dim + d] * key;
    }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < kParts; ++p) scores[r].parts[p] = sums[r][p];
}

// outputs [R, head_dim] = outputs * decays + weights [R, kTile] * values [num_keys, head_dim],
// N vectors of each row.
template <int R, int N>
inline void accumulate(const float* weights, const float* decays, const float* values,
                       int num_keys, int head_dim, float* outputs) {
  Vec sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n)
      sums[r][n] = load(outputs + r * head_dim + n * kLanes) * decays[r];
  for (int k = 0; k < num_keys; ++k)
    for (int n = 0; n < N; ++n) {
      Vec value = load(values + k * head_dim + n * kLanes);
      for (int r = 0; r < R; ++r) sums[r][n] += weights[r * kTile + k] * value;
    }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) store(outputs + r * head_dim + n * kLanes, sums[r][n]);
}

template <int R>
inline void accumulate_all(const float* weights, const float* decays, const float* values,
                           int num_keys, int head_dim, float* outputs) {
  constexpr int step = kOutputVecs * kLanes;
  int d = 0;
  for (; d + step <= head_dim; d += step)
    accumulate<R, kOutputVecs>(weights, decays, values + d, num_keys, head_dim, outputs + d);
  for (; d < head_dim; d += kLanes)
    accumulate<R, 1>(weights, decays, values + d, num_keys, head_dim, outputs + d);
}

}  // namespace

// One step. The caller owns the arrays and keeps them alive until the step's last call.
struct Step {
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int32_t* seq_lens;         // [num_reqs]
  const int32_t* block_table;      // [num_reqs, table_width]
  const int64_t* slot_mapping;     // [num_tokens]
  const int32_t* pieces;           // [num_pieces, 3]: request, first query, number of queries
  int64_t table_width, num_tokens, num_pieces, max_piece_queries;
  int64_t num_heads, num_kv_heads, head_dim, block_size, num_threads;
};

// The parameters that differ between layers. Strides are in elements, from token to token.
struct Layer {
  int64_t query_stride, key_stride, value_stride, window;  // window 0: none
  float scale, soft_cap;                                   // soft_cap 0: none
};

namespace {

struct Scratch {
  std::vector<float> queries, outputs, keys, values;
  std::vector<float> maxima, weights, decays;
  std::vector<TileRow> sums;

  Scratch(int64_t rows, int64_t head_dim)
      : queries(rows * head_dim),
        outputs(rows * head_dim),
        keys(head_dim * kTile),
        values(head_dim * kTile),
        maxima(rows),
        weights(rows * kTile),
        decays(rows),
        sums(rows) {}
};

template <typename T>
struct Piece {
  const Step& step;
  const Layer& layer;
  const T* query;
  const T* key_pool;
  const T* value_pool;
  T* out;
  Scratch& scratch;
  int request, first_query, num_queries, kv_head;

  int group() const { return int(step.num_heads / step.num_kv_heads); }
  int rows() const { return num_queries * group(); }
  int dim() const { return int(step.head_dim); }

  int64_t token(int row) const {
    return step.query_start_loc[request] + first_query + row / group();
  }
  int64_t head(int row) const { return int64_t(kv_head) * group() + row % group(); }
  int64_t position(int row) const {
    int64_t all = step.query_start_loc[request + 1] - step.query_start_loc[request];
    return step.seq_lens[request] - all + first_query + row / group();
  }

  void run() {
    for (int row = 0; row < rows(); ++row) {
      const T* from = query + token(row) * layer.query_stride + head(row) * dim();
      for (int d = 0; d < dim(); ++d)
        scratch.queries[row * dim() + d] = to_float(from[d]) * layer.scale;
      scratch.maxima[row] = -__builtin_inff();
      scratch.sums[row] = TileRow{};
    }
    std::memset(scratch.outputs.data(), 0, sizeof(float) * rows() * dim());
    int64_t last = position(rows() - 1);
    int64_t first = layer.window ? position(0) - layer.window + 1 : 0;
    for (int64_t start = (first > 0 ? first : 0) / kTile * kTile; start <= last; start += kTile)
      tile(start);
    for (int row = 0; row < rows(); ++row) finish(row);
  }

  // Offset of a tile's keys in the key pool, and of its values in the value pool.
  int64_t place(int64_t start) const {
    int64_t block = step.block_table[request * step.table_width + start / step.block_size];
    return ((block * step.num_kv_heads + kv_head) * step.block_size + start % step.block_size) *
           dim();
  }

  void tile(int64_t start) {
    int64_t left = step.seq_lens[request] - start;
    int num_keys = left < kTile ? int(left) : kTile;
    int64_t at = place(start);
    // The next tile may be in any block, so the hardware prefetcher cannot predict its address.
    if (left > kTile) {
      int64_t next = place(start + kTile);
      for (int64_t i = 0; i < kTile * dim(); i += 64 / int64_t(sizeof(T))) {
        __builtin_prefetch(key_pool + next + i);
        __builtin_prefetch(value_pool + next + i);
      }
    }
    load_keys(key_pool + at, num_keys);
    const float* values = load_values(value_pool + at, num_keys);
    int row = 0;
    for (; row + kScoreRows <= rows(); row += kScoreRows)
      rows_of_tile<kScoreRows>(row, start, num_keys, values);
    // Computing several rows at once hides the latency of each row's additions.
    if constexpr (kScoreRows > 4)
      for (; row + 4 <= rows(); row += 4) rows_of_tile<4>(row, start, num_keys, values);
    int rest = rows() - row;
    if (rest == 3) rows_of_tile<3>(row, start, num_keys, values);
    if (rest == 2) rows_of_tile<2>(row, start, num_keys, values);
    if (rest == 1) rows_of_tile<1>(row, start, num_keys, values);
  }

  // Loads keys transposed: one query component is then multiplied by all keys of the tile at once.
  void load_keys(const T* from, int num_keys) {
    for (int d = 0; d < dim(); d += kLanes)
      for (int first = 0; first < kTile; first += kLanes) {
        Vec rows[kLanes];
        for (int i = 0; i < kLanes; ++i)
          rows[i] = first + i < num_keys ? load(from + (first + i) * dim() + d) : Vec{};
        transpose(rows);
        for (int i = 0; i < kLanes; ++i) store(&scratch.keys[(d + i) * kTile + first], rows[i]);
      }
  }

  const float* load_values(const float* from, int) { return from; }

  const float* load_values(const uint16_t* from, int num_keys) {
    for (int i = 0; i < num_keys * dim(); ++i) scratch.values[i] = to_float(from[i]);
    return scratch.values.data();
  }

  template <int R>
  void rows_of_tile(int row, int64_t start, int num_keys, const float* values) {
    TileRow scores[R];
    score<R>(&scratch.queries[row * dim()], scratch.keys.data(), dim(), scores);
    for (int r = 0; r < R; ++r) softmax(row + r, start, num_keys, scores[r]);
    constexpr int some = R > kOutputRows ? kOutputRows : R;
    for (int r = 0; r < R; r += some)
      accumulate_all<some>(&scratch.weights[(row + r) * kTile], &scratch.decays[row + r], values,
                           num_keys, dim(), &scratch.outputs[(row + r) * dim()]);
  }

  // Computes a row's softmax weights relative to the row's new maximum.
  void softmax(int row, int64_t start, int num_keys, TileRow& scores) {
    if (layer.soft_cap != 0.0f)
      for (Vec& part : scores.parts) part = tanh(part / layer.soft_cap) * layer.soft_cap;
    int64_t to = position(row) - start;  // last key seen
    int64_t from = layer.window ? to - layer.window + 1 : 0;
    if (to < num_keys - 1 || num_keys < kTile || from > 0) {
      if (to > num_keys - 1) to = num_keys - 1;
      float each[kTile];
      std::memcpy(each, &scores, sizeof(each));
      for (int k = 0; k < kTile; ++k)
        if (k > to || k < from) each[k] = -__builtin_inff();
      std::memcpy(&scores, each, sizeof(each));
    }
    float tile_max = largest(scores), old = scratch.maxima[row];
    float* weights = &scratch.weights[row * kTile];
    if (tile_max == -__builtin_inff()) {  // the row sees no key of this tile
      std::memset(weights, 0, sizeof(TileRow));
      scratch.decays[row] = 1.0f;
      return;
    }
    float now = tile_max > old ? tile_max : old;
    float decay = now > old ? exp(splat(old - now))[0] : 1.0f;
    scratch.maxima[row] = now;
    scratch.decays[row] = decay;
    for (int p = 0; p < kParts; ++p) {
      Vec weight = exp(scores.parts[p] - now);
      Vec& sum = scratch.sums[row].parts[p];
      sum = sum * decay + weight;
      store(weights + p * kLanes, weight);
    }
  }

  void finish(int row) {
    float total = 0.0f;
    for (int k = 0; k < kTile; ++k) total += scratch.sums[row].parts[k / kLanes][k % kLanes];
    T* to = out + (token(row) * step.num_heads + head(row)) * dim();
    for (int d = 0; d < dim(); ++d) from_float(scratch.outputs[row * dim() + d] / total, to + d);
  }
};

template <typename T>
void attend(const Step& step, const Layer& layer, const T* query, const T* keys, const T* values,
            T* out) {
  int64_t count = step.num_pieces * step.num_kv_heads;
  int64_t rows = step.max_piece_queries * (step.num_heads / step.num_kv_heads);
#pragma omp parallel num_threads(int(step.num_threads))
  {
    Scratch scratch(rows, step.head_dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < count; ++i) {
      const int32_t* piece = step.pieces + i / step.num_kv_heads * 3;
      Piece<T>{step,    layer,    query,    keys,     values,
               out,     scratch,  piece[0], piece[1], piece[2],
               int(i % step.num_kv_heads)}
          .run();
    }
  }
}

template <typename T>
void write(const Step& step, const Layer& layer, const T* key, const T* value, T* keys,
           T* values) {
  size_t bytes = size_t(step.head_dim) * sizeof(T);
  for (int64_t token = 0; token < step.num_tokens; ++token) {
    int64_t slot = step.slot_mapping[token];
    int64_t block = slot / step.block_size, offset = slot % step.block_size;
    for (int64_t head = 0; head < step.num_kv_heads; ++head) {
      int64_t to = ((block * step.num_kv_heads + head) * step.block_size + offset) * step.head_dim;
      std::memcpy(keys + to, key + token * layer.key_stride + head * step.head_dim, bytes);
      std::memcpy(values + to, value + token * layer.value_stride + head * step.head_dim, bytes);
    }
  }
}

}  // namespace

extern "C" {

void attend_float32(const Step* step, const Layer* layer, const float* query, const float* keys,
                    const float* values, float* out) {
  attend(*step, *layer, query, keys, values, out);
}

void attend_bfloat16(const Step* step, const Layer* layer, const uint16_t* query,
                     const uint16_t* keys, const uint16_t* values, uint16_t* out) {
  attend(*step, *layer, query, keys, values, out);
}

void write_float32(const Step* step, const Layer* layer, const float* key, const float* value,
                   float* keys, float* values) {
  write(*step, *layer, key, value, keys, values);
}

void write_bfloat16(const Step* step, const Layer* layer, const uint16_t* key,
                    const uint16_t* value, uint16_t* keys, uint16_t* values) {
  write(*step, *layer, key, value, keys, values);
}
}
