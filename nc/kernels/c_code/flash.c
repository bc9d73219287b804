/* Attention of texts of different lengths: softmax(softcap(factor * q K^T)) V under a mask of positions, by
 * online softmax over blocks of keys (Rabe and Staats 2021, arXiv 2112.05682; Dao et al. 2022, arXiv
 * 2205.14135). No more than FLASH_ROWS x FLASH_KEYS scores are in memory.
 *
 * The rows of a text lie one after the other, and texts lie one after the other: starts say where. Blocks of
 * queries and of keys begin at the first row of a text, so its result has the same bits in any batch and on
 * any number of threads. bf16 is read as fp32, and the result is rounded; with AVX512-BF16
 * weights are rounded, too.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "calls.h"
#include "isa.h"
#include "openmp.h"

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 6")
enum {
    TILE_ROWS = 6, /* whose sums are in registers */
    FEW = 3, /* queries of a text whose keys are not copied */
    COLUMNS = 16, /* keys side by side, and what widths of values are filled up to */
    LANES_512 = 16,
    LANES_bf16 = 16,
    LANES_256 = 8,
    AT_ONCE_512 = 4, /* vectors of a row whose sums are in registers */
    AT_ONCE_bf16 = 4,
    AT_ONCE_256 = 2,
    IN_SLOT_512 = 1, /* numbers in a slot, see flash_block.h */
    IN_SLOT_bf16 = 2,
    IN_SLOT_256 = 1,
    LINE = FLASH_KEYS + 16, /* from row to row of scores: no power of 2, whose rows would share cache lines */
    QUERY = FLASH_WIDEST + 16, /* likewise of queries */
    AWAY = FLASH_ROWS + FLASH_KEYS + COLUMNS /* columns for the distances within a block, in whole panels */
};
_Static_assert(FLASH_ROWS % TILE_ROWS == 0 && FLASH_KEYS % 64 == 0, "no part of a block is left over");

/* What is added to scores by distance: the products of queries, or of keys, with the column of the distance. */
struct by_distance {
    const float *panels; /* [heads][columns / 16][width][16] */
    const int32_t *column; /* by key - query + how->distances - 1; neighbours differ by 1 at most */
    int64_t columns; /* 0: nothing is added */
};

struct job {
    const struct nc_flash *how;
    char *const *tensors;
    const int32_t *starts_q, *starts_k; /* starts_k: lengths, if there are pages */
    const int32_t *table; /* numbers of pages; NULL without pages */
    const float *added; /* to scores, by places of query and key in their text; NULL: nothing */
    struct by_distance of_queries, of_keys;
    double cost; /* of all */
};

/* A text, and a head of its keys. Its queries are those of all heads that share the keys: query n is row
 * n / group of the text. */
struct text {
    int64_t number, row, rows, key, keys, queries, head;
};

/* Keys from the first one to before the last one. */
struct span {
    int64_t first, last;
};

/* Memory of one thread. */
struct room {
    float *keys; /* [FLASH_KEYS / 16][width][16] */
    float *values; /* [FLASH_KEYS][wide, filled up] */
    float *queries; /* [FLASH_ROWS][QUERY], multiplied by the factor */
    float *scores; /* [FLASH_ROWS][LINE] */
    float *results; /* [FLASH_ROWS][wide, filled up], before they are divided by the sums */
    float *sums; /* [FLASH_ROWS][16] of exponentials, by lanes */
    float *most; /* [FLASH_ROWS], the largest scores */
    float *of_queries; /* [FLASH_ROWS][AWAY], see struct by_distance; only if there are distances */
    float *of_keys; /* [FLASH_KEYS][AWAY] */
};

INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

static struct room room_of(char *memory, const struct nc_flash *how)
{
    const int64_t wide = up(how->wide, COLUMNS);
    struct room room = {.keys = (float *)memory};
    room.values = room.keys + FLASH_KEYS * how->width;
    room.queries = room.values + FLASH_KEYS * wide;
    room.scores = room.queries + FLASH_ROWS * QUERY;
    room.results = room.scores + FLASH_ROWS * LINE;
    room.sums = room.results + FLASH_ROWS * wide;
    room.most = room.sums + FLASH_ROWS * 16;
    room.of_queries = room.most + FLASH_ROWS;
    room.of_keys = room.of_queries + FLASH_ROWS * AWAY;
    return room;
}

/* Bytes of it. */
static int64_t bytes_of_room(const struct nc_flash *how)
{
    const int64_t wide = up(how->wide, COLUMNS);
    const int64_t floats = FLASH_KEYS * (how->width + wide) + FLASH_ROWS * (QUERY + LINE + wide + 16 + 1);
    return 4 * (floats + (how->distances ? (FLASH_ROWS + FLASH_KEYS) * AWAY : 0));
}

INLINE int64_t bytes_of(const struct nc_flash *how) { return how->dtype == DTYPE_F32 ? 4 : 2; }

/* Address of the row of a query in q or y. */
INLINE char *query_at(const struct job *job, char *tensor, const int64_t *strides, const struct text *text,
    int64_t query)
{
    const int64_t group = job->how->group;
    const int64_t row = text->row + query / group, head = text->head * group + query % group;
    return tensor + (row * strides[0] + head * strides[1]) * bytes_of(job->how);
}

/* Address of a key, tensor 2, or of its value, tensor 3. */
INLINE const char *key_at(const struct job *job, int tensor, const struct text *text, int64_t key)
{
    const struct nc_flash *how = job->how;
    const int64_t *strides = tensor == 2 ? how->k_strides : how->v_strides;
    int64_t at = text->head * strides[1];
    if (job->table) {
        const int64_t page = job->table[text->number * how->most_blocks + key / how->block_size];
        at += page * how->block_strides[tensor - 2] + key % how->block_size * strides[0];
    } else
        at += (text->key + key) * strides[0];
    return job->tensors[tensor] + at * bytes_of(how);
}

/* Keys that a query sees: the last row of a text stands beside its last key. */
INLINE struct span seen_by(const struct nc_flash *how, const struct text *text, int64_t query)
{
    const int64_t beside = query / how->group + text->keys - text->rows, right = how->causal ? 0 : how->right;
    struct span seen = {0, text->keys};
    if (how->left >= 0 && how->left < text->keys + text->rows)
        seen.first = most_of(0, beside - how->left);
    if (right >= 0 && right < text->keys + text->rows)
        seen.last = most_of(0, least_of(text->keys, beside + right + 1));
    return seen;
}

/* Keys that some of `count` queries see: later rows see later keys. */
INLINE struct span seen_by_some(const struct nc_flash *how, const struct text *text, int64_t query,
    int64_t count)
{
    return (struct span){seen_by(how, text, query).first, seen_by(how, text, query + count - 1).last};
}

/* What is added to the scores of a query, by places of keys; NULL: nothing. */
INLINE const float *added_to(const struct job *job, const struct text *text, int64_t query)
{
    const int64_t group = job->how->group, *strides = job->how->added_strides;
    if (!job->added)
        return NULL;
    return job->added + (text->head * group + query % group) * strides[0] + query / group * strides[1];
}

/* Columns of the distances between some queries and some keys, in whole panels; `key` is the first one. */
INLINE struct span columns_of(const struct job *job, const struct by_distance *by, int64_t query, int64_t rows,
    int64_t key, int64_t keys)
{
    const int32_t *column = by->column + job->how->distances - 1;
    const int64_t a = column[key - (query + rows - 1)], b = column[key + keys - 1 - query];
    return (struct span){least_of(a, b) / COLUMNS * COLUMNS, up(most_of(a, b) + 1, COLUMNS)};
}

INLINE uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); /* to the nearest, ties to even */
}

#define FOR_AVX512 FOR_CPU("avx512f,avx512bw,avx512vl,avx2,fma")
#define FOR_AVX2 FOR_CPU("avx2,fma")
#include "bf16.h"
#include "exponential.h"
#include "exponential_256.h"
#include "transpose.h"

/* e^x for x <= 0: 0 below the range of exponential.h, and what is no number stays so. */
INLINE FOR_AVX512 __m512 weight_512(__m512 x)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ),
        exponential_of_16(x));
}

INLINE FOR_AVX2 __m256 weight_256(__m256 x)
{
    const __m256 inside = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_NLT_UQ);
    return _mm256_or_ps(_mm256_and_ps(inside, exponential_of_8(x)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

INLINE FOR_AVX2 float largest_256(__m256 x)
{
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

/* 8 x 8 numbers, rows of which become columns. */
INLINE FOR_AVX2 void transpose_256(__m256 x[8])
{
    __m256 y[8];
    UNROLL_16 for (int i = 0; i < 8; i += 4)
        UNROLL_16 for (int j = 0; j < 2; j++)
        {
            const __m256 low = _mm256_unpacklo_ps(x[i], x[i + 1]), high = _mm256_unpackhi_ps(x[i], x[i + 1]);
            const __m256 below = j ? _mm256_unpackhi_ps(x[i + 2], x[i + 3])
                                   : _mm256_unpacklo_ps(x[i + 2], x[i + 3]);
            y[i + 2 * j] = _mm256_shuffle_ps(j ? high : low, below, 0x44);
            y[i + 2 * j + 1] = _mm256_shuffle_ps(j ? high : low, below, 0xee);
        }
    UNROLL_16 for (int i = 0; i < 4; i++)
    {
        x[i] = _mm256_permute2f128_ps(y[i], y[4 + i], 0x20);
        x[4 + i] = _mm256_permute2f128_ps(y[i], y[4 + i], 0x31);
    }
}

#define NAMED(name) name##_512
#define FOR_THIS FOR_AVX512
#define VECTOR __m512
#define OF_VECTOR(name) _mm512_##name##_ps
#define LARGEST(x) _mm512_reduce_max_ps(x)
#define TRANSPOSE(x) transpose(x)
#define WIDENED(from)                                                                                    \
    _mm512_castsi512_ps(                                                                                 \
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from))), 16))
#define ADD_PRODUCTS(sum, a, b) ((sum) = OF_VECTOR(fmadd)(a, b, sum))
#define PAIRED(a, b) ((void)(b), (a))
#define STORE_BF16(to, v) ((void)(to))
#include "flash_block.h"

#define NAMED(name) name##_256
#define FOR_THIS FOR_AVX2
#define VECTOR __m256
#define OF_VECTOR(name) _mm256_##name##_ps
#define LARGEST(x) largest_256(x)
#define TRANSPOSE(x) transpose_256(x)
#define WIDENED(from)                                                                                    \
    _mm256_castsi256_ps(                                                                                 \
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from))), 16))
#define ADD_PRODUCTS(sum, a, b) ((sum) = OF_VECTOR(fmadd)(a, b, sum))
#define PAIRED(a, b) ((void)(b), (a))
#define STORE_BF16(to, v) ((void)(to))
#include "flash_block.h"

#if HAS_BF16
#define NAMED(name) name##_bf16
#define FOR_THIS FOR_AVX512
#define VECTOR __m512
#define OF_VECTOR(name) _mm512_##name##_ps
#define LARGEST(x) _mm512_reduce_max_ps(x)
#define TRANSPOSE(x) transpose(x)
#define WIDENED(from)                                                                                    \
    _mm512_castsi512_ps(                                                                                 \
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from))), 16))
#define ADD_PRODUCTS(sum, a, b)                                                                           \
    do {                                                                                                  \
        __m512i of_bf16 = _mm512_castps_si512(sum);                                                       \
        VDPBF16PS_512(of_bf16, _mm512_castps_si512(a), _mm512_castps_si512(b));                           \
        (sum) = _mm512_castsi512_ps(of_bf16);                                                             \
    } while (0)
/* b behind a, both of which are bf16 */
#define PAIRED(a, b)                                                                                      \
    _mm512_castsi512_ps(                                                                                  \
        _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b)))
#define STORE_BF16(to, v)                                                                                 \
    _mm256_storeu_si256(                                                                                  \
        (__m256i *)(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_to_bf16(v), 16)))
#define weight_bf16 weight_512
#include "flash_block.h"
#endif

static struct text text_of(const struct job *job, int64_t number)
{
    struct text text = {.number = number, .row = job->starts_q[number], .key = 0};
    text.rows = job->starts_q[number + 1] - text.row;
    text.queries = text.rows * job->how->group;
    if (job->table)
        text.keys = job->starts_k[number];
    else {
        text.key = job->starts_k[number];
        text.keys = job->starts_k[number + 1] - text.key;
    }
    return text;
}

/* Products of a query with a key that a block takes, and what it takes besides. */
static double cost_of(const struct job *job, const struct text *text, int64_t query)
{
    const int64_t count = least_of(FLASH_ROWS, text->queries - query);
    const struct span seen = seen_by_some(job->how, text, query, count);
    return (double)(count + 8) * (double)(most_of(0, seen.last - seen.first) + 8);
}

/* Of all blocks of one head. */
static double cost_of_head(const struct job *job, const struct text *text)
{
    double cost = 0;
    for (int64_t query = 0; query < text->queries; query += FLASH_ROWS)
        cost += cost_of(job, text, query);
    return cost;
}

static void attend(const struct job *job, const struct room *room, const struct text *text, int64_t query,
    int64_t rows)
{
#if HAS_BF16
    if (job->how->isa == ISA_AVX512_BF16)
        attend_bf16(job, room, text, query, rows);
    else
#endif
        if (job->how->isa == ISA_AVX512)
        attend_512(job, room, text, query, rows);
    else
        attend_256(job, room, text, query, rows);
}

/* A part takes the blocks that begin in its part of the cost. */
static void work(void *data, int64_t part, int64_t parts)
{
    const struct job *job = data;
    const struct nc_flash *how = job->how;
    const struct room room = room_of(job->tensors[6] + part * how->bytes, how);
    const double begin = job->cost * (double)part / (double)parts;
    const double end = part + 1 < parts ? job->cost * (double)(part + 1) / (double)parts : INFINITY;
    double at = 0;
    for (int64_t number = 0; number < how->texts && at < end; number++) {
        struct text text = text_of(job, number);
        const double each = cost_of_head(job, &text);
        for (text.head = 0; text.head < how->heads / how->group && at < end; text.head++) {
            const double next = at + each;
            if (next > begin)
                for (int64_t query = 0; query < text.queries && at < end; query += FLASH_ROWS) {
                    const int64_t count = least_of(FLASH_ROWS, text.queries - query);
                    if (at >= begin)
                        attend(job, &room, &text, query, count);
                    at += cost_of(job, &text, query);
                }
            at = next;
        }
    }
}

/* Whether starts of texts begin with 0, do not fall, and end with `all`. */
static int are_starts(const int32_t *starts, int64_t texts, int64_t all)
{
    if (starts[0] || starts[texts] != all)
        return 0;
    for (int64_t i = 0; i < texts; i++)
        if (starts[i] > starts[i + 1])
            return 0;
    return 1;
}

/* Whether there are such pages for so many keys of each text. */
static int are_pages(const struct job *job)
{
    const struct nc_flash *how = job->how;
    const int64_t blocks = how->keys / how->block_size;
    for (int64_t text = 0; text < how->texts; text++) {
        const int64_t keys = job->starts_k[text], used = (keys + how->block_size - 1) / how->block_size;
        if (keys < 0 || used > how->most_blocks)
            return 0;
        for (int64_t i = 0; i < used; i++) {
            const int64_t block = job->table[text * how->most_blocks + i];
            if (block < 0 || block >= blocks)
                return 0;
        }
    }
    return 1;
}

/* Whether columns rise or fall by 1 at most from distance to distance, and exist. */
static int are_columns(const struct by_distance *by, int64_t distances)
{
    int rises = 0, falls = 0;
    for (int64_t i = 0; by->columns && i < 2 * distances - 1; i++) {
        const int64_t step = i ? (int64_t)by->column[i] - by->column[i - 1] : 0;
        if (by->column[i] < 0 || by->column[i] >= by->columns || step > 1 || step < -1)
            return 0;
        rises |= step > 0;
        falls |= step < 0;
    }
    return !(rises && falls);
}

/* tensors: y, q, k, v, starts of queries, starts of keys (pages: lengths) in int32; memory for all threads, of
 * 64-byte pieces; pages [texts, most_blocks] in int32; what is added to scores, fp32; panels and columns of
 * queries, then of keys, see struct by_distance */
int nc_flash(const struct nc_flash *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_flash);
    EXPECT(how->isa >= ISA_AVX2 && how->isa <= ISA_AMX && nc_may_use() >> how->isa & 1, NOT_HERE);
    EXPECT(how->dtype == DTYPE_BF16 || (how->dtype == DTYPE_F32 && how->isa != ISA_AVX512_BF16), OTHER_DTYPE);
    EXPECT(how->most_blocks >= 0 && how->added_places >= 0, OTHER_TENSORS);
    EXPECT(how->query_columns >= 0 && how->key_columns >= 0 && how->distances >= 0, OTHER_TENSORS);
    const int of_distances = 2 * ((how->query_columns > 0) + (how->key_columns > 0));
    const int others = (how->most_blocks > 0) + (how->added_places > 0);
    EXPECT(count == nc_flash_least + others + of_distances, OTHER_TENSORS);
    EXPECT(!of_distances == !how->distances && !(of_distances && others), OTHER_TENSORS);
    EXPECT(!of_distances || (how->dtype == DTYPE_F32 && how->group == 1), OTHER_DTYPE);
    EXPECT(how->texts >= 0 && how->rows >= 0 && how->keys >= 0 && how->heads > 0, OTHER_SIZE);
    EXPECT(how->group > 0 && how->heads % how->group == 0 && how->threads > 0, OTHER_SIZE);
    EXPECT(how->width > 0 && how->width <= FLASH_WIDEST, OTHER_SIZE);
    EXPECT(how->wide > 0 && how->wide <= FLASH_WIDEST, OTHER_SIZE);
    EXPECT(how->left >= -1 && how->right >= -1 && how->softcap >= 0, OTHER_SIZE);
    EXPECT(bytes_of_room(how) <= how->bytes, OTHER_SIZE);
    struct job job = {how, tensors, (const int32_t *)tensors[4], (const int32_t *)tensors[5], NULL,
        how->added_places ? (const float *)tensors[count - 1] : NULL,
        {.columns = how->query_columns}, {.columns = how->key_columns}, 0};
    char *const *next = tensors + nc_flash_least;
    for (int i = 0; of_distances && i < 2; i++) {
        struct by_distance *by = i ? &job.of_keys : &job.of_queries;
        if (!by->columns)
            continue;
        by->panels = (const float *)*next++;
        by->column = (const int32_t *)*next++;
        EXPECT(are_columns(by, how->distances), OTHER_INDEX);
    }
    EXPECT(are_starts(job.starts_q, how->texts, how->rows), OTHER_INDEX);
    if (how->most_blocks) {
        job.table = (const int32_t *)tensors[7];
        EXPECT(how->block_size > 0 && how->keys % how->block_size == 0, OTHER_SIZE);
        EXPECT(are_pages(&job), OTHER_INDEX);
    } else
        EXPECT(are_starts(job.starts_k, how->texts, how->keys), OTHER_INDEX);
    const int64_t heads = how->heads / how->group;
    for (int64_t number = 0; number < how->texts; number++) {
        const struct text text = text_of(&job, number);
        EXPECT(!job.added || most_of(text.rows, text.keys) <= how->added_places, OTHER_SIZE);
        EXPECT(!of_distances || (text.rows == text.keys && text.rows <= how->distances), OTHER_SIZE);
        job.cost += (double)heads * cost_of_head(&job, &text);
    }
    /* as much work as some ten thousand products is done before other threads wake up */
    const double worth = 1 + job.cost * (double)(how->width + how->wide) / 131072;
    in_parts(work, &job, worth < 1e9 ? (int64_t)worth : 1000000000, how->threads);
    return OK;
}

CODE_FOR(1 << ISA_AVX2 | 1 << ISA_AVX512 | 1 << ISA_AVX512_BF16)

/* The best instruction set for a dtype that the CPU has and the library may use; -1: none. */
int64_t nc_flash_isa(int64_t dtype)
{
    (void)dtype;
    if (!CPU_SUPPORTS("avx2") || !CPU_SUPPORTS("fma"))
        return -1;
    if (CPU_SUPPORTS("avx512f") && CPU_SUPPORTS("avx512bw") && CPU_SUPPORTS("avx512vl")) {
#if HAS_BF16
        if (dtype == DTYPE_BF16 && nc_may_use() >> ISA_AVX512_BF16 & 1 && CPU_SUPPORTS("avx512bf16"))
            return ISA_AVX512_BF16;
#endif
        if (nc_may_use() >> ISA_AVX512 & 1)
            return ISA_AVX512;
    }
    return nc_may_use() >> ISA_AVX2 & 1 ? ISA_AVX2 : -1;
}
