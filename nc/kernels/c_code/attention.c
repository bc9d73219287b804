/* Attention of int8 codes at once: scores, softmax and its codes, sums of values.
 *
 * A few rows of the scores are computed at a time, so they stay in the first cache. oneDNN writes and reads
 * all of them in fp32.
 */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "calls.h"
#include "isa.h"
#include "openmp.h"

#define FOR_VNNI FOR_CPU("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma")
#define FOR_AVX512 FOR_VNNI
#define FOR_AVX2 FOR_CPU("avx2,fma")
#include "attention.h"
#include "exponential.h"
#include "exponential_256.h"
#include "lanes_256.h"
#include "texts.h"

enum {
    LANES_512 = 16, /* scores in a vector */
    LANES_vnni = WIDTH,
    LANES_256 = WIDTH,
    GROUP_512 = 4, /* codes whose products one instruction adds */
    GROUP_vnni = 4,
    GROUP_256 = 2,
    BLOCKS_AT_ONCE_512 = 4,
    BLOCKS_AT_ONCE_vnni = 2,
    BLOCKS_AT_ONCE_256 = 2,
    WIDEST_VECTOR = 16
};
_Static_assert(WIDEST_HEAD % WIDEST_VECTOR == 0, "rows of q are read a vector at a time");

struct job {
    const struct nc_int8_attention *how;
    char *const *tensors;
};

/* Memory of one thread; keys and values in the order in which they are multiplied: the outputs of a vector side
 * by side, inputs of a group behind each other. Codes have 2 bytes with AVX2. */
struct room {
    char *keys, *values;
    int32_t *of_keys; /* what the zero points of q and k take off each sum */
    float *scores, *sums;
    char *codes;
};

static int64_t bytes_of_code(const struct nc_int8_attention *how) { return how->isa == ISA_AVX2 ? 2 : 1; }

static struct room room_of(char *memory, const struct nc_int8_attention *how)
{
    const int64_t keys = up(how->keys, WIDEST_VECTOR), wide = up(how->wide, WIDEST_VECTOR),
        bytes = bytes_of_code(how);
    struct room room;
    room.keys = memory;
    room.values = room.keys + keys * up(how->width, 4) * bytes;
    room.of_keys = (int32_t *)(room.values + keys * wide * bytes);
    room.scores = (float *)(room.of_keys + keys);
    room.sums = room.scores + SCORE_ROWS * keys;
    room.codes = (char *)(room.sums + SCORE_ROWS * wide);
    return room;
}

/* Bytes of it. */
static int64_t bytes_of_room(const struct nc_int8_attention *how)
{
    const int64_t keys = up(how->keys, WIDEST_VECTOR), wide = up(how->wide, WIDEST_VECTOR),
        bytes = bytes_of_code(how);
    return keys * ((up(how->width, 4) + wide + SCORE_ROWS) * bytes + 4 + SCORE_ROWS * 4) +
           SCORE_ROWS * wide * 4;
}

/* ---- vectors ---- */

INLINE FOR_VNNI __m512 some_512(const float *from, int64_t n) { return _mm512_maskz_loadu_ps(lanes_of(n), from); }

AVX2_INLINE __m256 some_256(const float *from, int64_t n) { return some_8(from, n); }

/* The first n of x, and the others of `rest`. */
INLINE FOR_VNNI __m512 first_512(__m512 x, int64_t n, __m512 rest)
{
    return _mm512_mask_mov_ps(rest, lanes_of(n), x);
}

AVX2_INLINE __m256 first_256(__m256 x, int64_t n, __m256 rest)
{
    return _mm256_blendv_ps(rest, x, _mm256_castsi256_ps(first_of_8(n)));
}

INLINE FOR_VNNI void put_some_512(float *to, int64_t n, __m512 x) { _mm512_mask_storeu_ps(to, lanes_of(n), x); }

AVX2_INLINE void put_some_256(float *to, int64_t n, __m256 x)
{
    if (n >= WIDTH)
        _mm256_storeu_ps(to, x);
    else
        _mm256_maskstore_ps(to, first_of_8(n), x);
}

INLINE FOR_VNNI __m128i some_codes_512(const void *from, int64_t n)
{
    return _mm_maskz_loadu_epi8(lanes_of(n), from);
}

AVX2_INLINE __m128i some_codes_256(const void *from, int64_t n) { return some_codes(from, n); }

/* Codes from integers from 0 to 255, and zeros. */
INLINE FOR_VNNI __m128i narrowed_512(__m512i codes) { return _mm512_cvtusepi32_epi8(codes); }

AVX2_INLINE __m128i narrowed_256(__m256i codes)
{
    const __m128i words =
        _mm_packs_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
    return _mm_packus_epi16(words, _mm_setzero_si128());
}

INLINE FOR_VNNI void put_some_codes_512(char *to, int64_t n, __m512i codes)
{
    _mm_mask_storeu_epi8(to, lanes_of(n), narrowed_512(codes));
}

AVX2_INLINE void put_some_codes_256(char *to, int64_t n, __m256i codes)
{
    const int64_t found = _mm_cvtsi128_si64(narrowed_256(codes));
    memcpy(to, &found, (size_t)(n < WIDTH ? n : WIDTH));
}

INLINE FOR_VNNI __m512i to_integers_512(__m512 x) { return _mm512_cvtps_epi32(x); }
AVX2_INLINE __m256i to_integers_256(__m256 x) { return _mm256_cvtps_epi32(x); }

INLINE FOR_VNNI __m512 rounded_512(__m512 x)
{
    return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

AVX2_INLINE __m256 rounded_256(__m256 x)
{
    return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* e^x for x <= 0; what is no number stays so. */
INLINE FOR_VNNI __m512 exponential_512(__m512 x) { return exponential_of_16(x); }

AVX2_INLINE __m256 exponential_256(__m256 x)
{
    return _mm256_or_ps(exponential_of_8(x), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

INLINE FOR_VNNI float largest_512(__m512 x) { return _mm512_reduce_max_ps(x); }

AVX2_INLINE float largest_256(__m256 x)
{
    __m128 most = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    most = _mm_max_ps(most, _mm_movehl_ps(most, most));
    return _mm_cvtss_f32(_mm_max_ss(most, _mm_movehdup_ps(most)));
}

INLINE FOR_VNNI float sum_512(__m512 x) { return _mm512_reduce_add_ps(x); }

AVX2_INLINE float sum_256(__m256 x)
{
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
}

/* ---- codes in the order in which they are multiplied ---- */

/* As many codes of probabilities or of q as a vector has scores. */
INLINE FOR_VNNI void put_left_512(uint8_t *to, __m128i codes) { _mm_storeu_si128((__m128i *)to, codes); }

AVX2_INLINE void put_left_vnni(uint8_t *to, __m128i codes) { _mm_storel_epi64((__m128i *)to, codes); }

AVX2_INLINE void put_left_256(int16_t *to, __m128i codes)
{
    _mm_storeu_si128((__m128i *)to, _mm_cvtepu8_epi16(codes));
}

/* Sums of 16 codes, in two parts, are added; and both parts. */
AVX2_INLINE __m128i add_codes(__m128i sums, __m128i codes)
{
    return _mm_add_epi32(sums, _mm_sad_epu8(codes, _mm_setzero_si128()));
}

AVX2_INLINE int32_t total_of(__m128i sums) { return _mm_extract_epi32(sums, 0) + _mm_extract_epi32(sums, 2); }

/* A key, in `memory` where its codes are widened. */
INLINE const void *key_512(const int8_t *key, int64_t width, int8_t *memory)
{
    (void)width, (void)memory;
    return key;
}

INLINE const void *key_vnni(const int8_t *key, int64_t width, int8_t *memory) { return key_512(key, width, memory); }

AVX2_INLINE const void *key_256(const int8_t *key, int64_t width, int16_t *memory)
{
    for (int64_t i = 0; i < width; i += WIDTH)
        _mm_storeu_si128((__m128i *)(memory + i),
            _mm_cvtepi8_epi16(some_codes((const char *)key + i, width - i)));
    return memory;
}

/* Codes of a group of rows behind each other, for each column of a vector. */
INLINE FOR_VNNI void put_group_512(char *to, const __m128i *rows)
{
    const __m128i a = _mm_unpacklo_epi8(rows[0], rows[1]), b = _mm_unpackhi_epi8(rows[0], rows[1]);
    const __m128i c = _mm_unpacklo_epi8(rows[2], rows[3]), d = _mm_unpackhi_epi8(rows[2], rows[3]);
    _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi16(a, c));
    _mm_storeu_si128((__m128i *)(to + 16), _mm_unpackhi_epi16(a, c));
    _mm_storeu_si128((__m128i *)(to + 32), _mm_unpacklo_epi16(b, d));
    _mm_storeu_si128((__m128i *)(to + 48), _mm_unpackhi_epi16(b, d));
}

AVX2_INLINE void put_group_vnni(char *to, const __m128i *rows)
{
    const __m128i a = _mm_unpacklo_epi8(rows[0], rows[1]), c = _mm_unpacklo_epi8(rows[2], rows[3]);
    _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi16(a, c));
    _mm_storeu_si128((__m128i *)(to + 16), _mm_unpackhi_epi16(a, c));
}

AVX2_INLINE void put_group_256(char *to, const __m128i *rows)
{
    const __m128i a = _mm_cvtepi8_epi16(rows[0]), b = _mm_cvtepi8_epi16(rows[1]);
    _mm_storeu_si128((__m128i *)to, _mm_unpacklo_epi16(a, b));
    _mm_storeu_si128((__m128i *)(to + 16), _mm_unpackhi_epi16(a, b));
}

/* ---- rows of one head ---- */

#define NAMED(name) name##_512
#define OF_WIDTH(name) name##_512
#define FOR_THIS FOR_VNNI
#define VECTOR __m512
#define OF_VECTOR(name) _mm512_##name##_ps
#define INTEGERS __m512i
#define OF_INTEGERS(name) _mm512_##name##_epi32
#define LOADED(from) _mm512_loadu_si512(from)
#define STORE(to, x) _mm512_storeu_si512(to, x)
#define TO_NUMBERS(x) _mm512_cvtepi32_ps(x)
#define LEFT uint8_t
#define RIGHT int8_t
#define ONES 0x01010101
#define ADD_PRODUCTS VPDPBUSD_512
#include "attention_block.h"
#undef OF_WIDTH
#undef FOR_THIS
#undef VECTOR
#undef OF_VECTOR
#undef INTEGERS
#undef OF_INTEGERS
#undef LOADED
#undef STORE
#undef TO_NUMBERS

#define OF_WIDTH(name) name##_256
#define FOR_THIS FOR_AVX2
#define VECTOR __m256
#define OF_VECTOR(name) _mm256_##name##_ps
#define INTEGERS __m256i
#define OF_INTEGERS(name) _mm256_##name##_epi32
#define LOADED(from) _mm256_loadu_si256((const __m256i *)(from))
#define STORE(to, x) _mm256_storeu_si256((__m256i *)(to), x)
#define TO_NUMBERS(x) _mm256_cvtepi32_ps(x)

#if HAS_AVX_VNNI
#define NAMED(name) name##_vnni
#define LEFT uint8_t
#define RIGHT int8_t
#define ONES 0x01010101
#define ADD_PRODUCTS VPDPBUSD_256
#include "attention_block.h"
#endif

/* Widened codes: vpmaddubsw would add products of bytes in 16 bits, which saturate. */
#define NAMED(name) name##_256
#define LEFT int16_t
#define RIGHT int16_t
#define ONES 0x00010001
#define ADD_PRODUCTS VPMADDWD_256
#include "attention_block.h"

#if HAS_AVX_VNNI
#define IF_AVX_VNNI(call) call
#else
#define IF_AVX_VNNI(call) (void)0
#endif
/* Calls a function for the instruction set. */
#define BY_ISA(name, ...)                                              \
    switch (job->how->isa) {                                           \
    case ISA_AVX512_VNNI: name##_512(__VA_ARGS__); break;              \
    case ISA_AVX_VNNI: IF_AVX_VNNI(name##_vnni(__VA_ARGS__)); break;   \
    default: name##_256(__VA_ARGS__);                                  \
    }

static void pack_head(const struct job *job, const struct room *room, int64_t batch, int64_t head)
{
    BY_ISA(pack_head, job, room, batch, head)
}

static void attend_rows(const struct job *job, const struct room *room, int64_t batch, int64_t head,
    int64_t row, int64_t end)
{
    BY_ISA(attend_rows, job, room, batch, head, row, end)
}

static void work(void *data, int64_t part, int64_t parts)
{
    const struct job *job = data;
    const struct nc_int8_attention *how = job->how;
    const int64_t pieces = how->parts, tasks = how->batch * how->heads * pieces;
    const struct room room = room_of(job->tensors[4] + part * how->bytes, how);
    int64_t packed = -1;
    for (int64_t task = tasks * part / parts; task < tasks * (part + 1) / parts; task++) {
        const int64_t which = task / pieces, batch = which / how->heads, head = which % how->heads,
            piece = task % pieces;
        if (which != packed)
            pack_head(job, &room, batch, head);
        packed = which;
        attend_rows(job, &room, batch, head, how->rows * piece / pieces, how->rows * (piece + 1) / pieces);
    }
}

/* ---- over texts whose rows follow each other ---- */

struct on_texts {
    const struct job *job;
    struct texts texts;
};

struct part_of_texts {
    const struct on_texts *all;
    char *room;
};

static void attend_text(void *data, int64_t text, int64_t head, int64_t first, int64_t end)
{
    const struct part_of_texts *part = data;
    const struct nc_int8_attention *all = part->all->job->how;
    char *const *given = part->all->job->tensors;
    const int64_t begin = part->all->texts.starts[text], of_result = all->to == DTYPE_F32 ? 4 : 1;
    struct nc_int8_attention how = *all;
    how.rows = how.keys = part->all->texts.starts[text + 1] - begin;
    char *tensors[5 + MOST_FOLLOWERS] = {given[0] + begin * how.y_strides[2] * of_result,
        given[1] + begin * how.q_strides[2], given[2] + begin * how.k_strides[2],
        given[3] + begin * how.v_strides[2]};
    for (int64_t i = 0; i < how.before + how.behind; i++)
        tensors[5 + i] = given[5 + i];
    const struct job job = {&how, tensors};
    const struct room room = room_of(part->room, &how);
    pack_head(&job, &room, 0, head);
    attend_rows(&job, &room, 0, head, first, end);
}

static void work_on_texts(void *data, int64_t part, int64_t parts)
{
    const struct on_texts *all = data;
    struct part_of_texts mine = {all, all->job->tensors[4] + part * all->job->how->bytes};
    each_text(&all->texts, attend_text, &mine, part, parts);
}

/* tensors: y; q in uint8, k and v in int8; memory for all threads, of 64-byte pieces; the others, in fp32; with
 * `texts` where each of `batch` texts begins, int32 */
int nc_int8_attention(const struct nc_int8_attention *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_int8_attention);
    struct job job = {how, tensors};
    EXPECT(how->isa >= ISA_AVX2 && how->isa <= ISA_AMX && nc_may_use() >> how->isa & 1, NOT_HERE);
    EXPECT(how->before >= 0 && how->before <= MOST_FOLLOWERS, OTHER_SIZE);
    EXPECT(how->behind >= 0 && how->behind <= MOST_FOLLOWERS - how->before, OTHER_SIZE);
    EXPECT(count == 5 + how->before + how->behind + (how->texts != 0), OTHER_TENSORS);
    EXPECT(how->batch >= 0 && how->heads >= 0 && how->rows >= 0 && how->threads > 0, OTHER_SIZE);
    EXPECT(how->keys > 0 && how->width > 0 && how->width <= WIDEST_HEAD && how->wide > 0 && how->parts > 0,
        OTHER_SIZE);
    EXPECT(bytes_of_room(how) <= how->bytes, OTHER_SIZE);
    EXPECT(how->to == DTYPE_U8 || how->to == DTYPE_F32, OTHER_DTYPE);
    for (int64_t i = 0; i < how->before + how->behind; i++)
        EXPECT(how->followers[i] == FOLLOW_ADD || how->followers[i] == FOLLOW_MUL, OTHER_OPERATION);
    const struct on_texts texts = {&job, {(const int32_t *)tensors[count - 1], how->batch, how->heads}};
    const int wrong = how->texts ? check_texts(&texts.texts, how->rows, how->keys) : OK;
    EXPECT(!wrong, wrong);
    const int64_t products = how->texts ? cost_of_texts(&texts.texts)
                                        : how->batch * how->heads * how->rows * how->keys;
    /* as much work as some thousand products is done before other threads wake up */
    const int64_t worth = 1 + products * (how->width + how->wide) / 524288;
    if (how->texts)
        in_parts(work_on_texts, (void *)&texts, worth, how->threads);
    else
        in_parts(work, &job, worth, how->threads);
    return OK;
}

CODE_FOR(1 << ISA_AVX2 | 1 << ISA_AVX_VNNI | 1 << ISA_AVX512_VNNI)
