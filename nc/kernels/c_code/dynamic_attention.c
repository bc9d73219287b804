/* Attention whose two products are of int8 codes with ranges found in each call, for CPUs with AVX512-VNNI:
 * softmax(q K^T * factor + mask) V, of q, K, V and a result in fp32.
 *
 * Each row of q is rounded to uint8 with a scale and a zero point of its own, each row of K and of V to int8
 * with a scale of its own. The sums of both products are exact, in int32. A row of probabilities is rounded
 * to uint8 times the scales of the rows of V, which is what the second product sums. With w = e^score * scale
 * of V and m, the largest w of a row, codes are 255 w / m, and the result is
 *
 *     sum(code * code of V) / (255 / m * sum(w / scale of V))
 *
 * So the largest code is always 255, and all that has to be known of a row before its codes is the largest
 * score + ln scale of V.
 *
 * A few rows of the scores are computed at a time, so they stay in the first cache. Codes of keys and values
 * of a head are made once, in the order in which they are multiplied.
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
#include "attention.h"
#include "exponential.h"
#include "texts.h"
#include "transpose.h"

enum { BLOCKS_AT_ONCE = 4 };
#define NAMED(name) name
#define FOR_THIS FOR_VNNI
#define INTEGERS __m512i
#define OF_INTEGERS(name) _mm512_##name##_epi32
#define LOADED(from) _mm512_loadu_si512(from)
#define ADD_PRODUCTS VPDPBUSD_512
#include "multiply_codes.h"

#define TINY 0x1p-100f /* as in nc.numerics.affine */

/* Rows that are rounded together. */
enum { ROUNDED = 16 };
_Static_assert(ROUNDED % SCORE_ROWS == 0, "rows that are rounded together are attended to in whole steps");

struct job {
    const struct nc_dynamic_attention *how;
    char *const *tensors;
};

/* Memory of one thread. Codes of keys and values: 16 outputs side by side, 4 inputs behind each other. */
struct room {
    int8_t *keys, *values;
    float *key_scales, *key_sums; /* sums of the codes of each key */
    float *logs, *inverses; /* ln v and 1 / v, of the scale v of each row of values */
    float *scores;
    uint8_t *codes, *queries; /* [SCORE_ROWS][keys], [ROUNDED][padded width] */
};

static struct room room_of(char *memory, const struct nc_dynamic_attention *how)
{
    const int64_t keys = up(how->keys, 16);
    struct room room = {.keys = (int8_t *)memory};
    room.values = room.keys + keys * up(how->width, 4);
    room.key_scales = (float *)(room.values + keys * up(how->wide, 16));
    room.key_sums = room.key_scales + keys;
    room.logs = room.key_sums + keys;
    room.inverses = room.logs + keys;
    room.scores = room.inverses + keys;
    room.codes = (uint8_t *)(room.scores + SCORE_ROWS * keys);
    room.queries = room.codes + SCORE_ROWS * keys;
    return room;
}

/* Bytes of it. */
static int64_t bytes_of_room(const struct nc_dynamic_attention *how)
{
    const int64_t keys = up(how->keys, 16);
    return keys * (up(how->width, 4) + up(how->wide, 16) + 4 * 4 + SCORE_ROWS * (4 + 1))
        + ROUNDED * up(how->width, 16);
}

/* ---- ranges ---- */

/* The largest of each of 16 vectors, as integers: of bits of numbers that are not negative that is the
 * largest number, and what is no number is larger than all. */
INLINE FOR_VNNI __m512 largest_of_each(const __m512i x[16])
{
    __m512i y[8];
    UNROLL_16 for (int i = 0; i < 8; i++)
        y[i] = _mm512_max_epi32(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
            _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
    UNROLL_16 for (int i = 0; i < 4; i++)
        y[i] = _mm512_max_epi32(_mm512_unpacklo_epi64(y[2 * i], y[2 * i + 1]),
            _mm512_unpackhi_epi64(y[2 * i], y[2 * i + 1]));
    UNROLL_16 for (int i = 0; i < 2; i++)
        y[i] = _mm512_max_epi32(_mm512_shuffle_i32x4(y[2 * i], y[2 * i + 1], 0x88),
            _mm512_shuffle_i32x4(y[2 * i], y[2 * i + 1], 0xdd));
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_shuffle_i32x4(y[0], y[1], 0x88),
        _mm512_shuffle_i32x4(y[0], y[1], 0xdd)));
}

/* Infinite numbers, and what is none, as what is none. */
INLINE FOR_VNNI __m512 only_finite(__m512 x)
{
    const __mmask16 known = _mm512_cmp_ps_mask(x, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
    return _mm512_mask_mov_ps(_mm512_set1_ps(NAN), known, x);
}

/* The largest magnitudes of 16 rows. Rows that there are not have 0. */
INLINE FOR_VNNI __m512 magnitudes(const float *x, int64_t step, int64_t rows, int64_t n)
{
    __m512i most[16];
    for (int64_t r = 0; r < 16; r++) {
        most[r] = _mm512_setzero_si512();
        for (int64_t i = 0; r < rows && i < n; i += 16)
            most[r] = _mm512_max_epi32(most[r],
                _mm512_castps_si512(_mm512_abs_ps(_mm512_maskz_loadu_ps(lanes_of(n - i), x + r * step + i))));
    }
    return only_finite(largest_of_each(most));
}

/* 1 / scale, by which numbers are multiplied to be codes. */
INLINE FOR_VNNI __m512 reciprocal(__m512 scale)
{
    return _mm512_div_ps(_mm512_set1_ps(1.0f), scale);
}

/* ln x of positive numbers that are not denormal; what is no number stays so. */
INLINE FOR_VNNI __m512 logarithm(__m512 x)
{
    /* x = m * 2^n with m from sqrt(1/2) to sqrt(2), of which cephes' polynomial gives the logarithm */
    const __m512i bits = _mm512_sub_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x3f3504f3));
    const __m512 n = _mm512_cvtepi32_ps(_mm512_srai_epi32(bits, 23));
    const __m512 m = _mm512_castsi512_ps(_mm512_add_epi32(
        _mm512_and_si512(bits, _mm512_set1_epi32(0x007fffff)), _mm512_set1_epi32(0x3f3504f3)));
    const __m512 f = _mm512_sub_ps(m, _mm512_set1_ps(1.0f)), square = _mm512_mul_ps(f, f);
    __m512 p = _mm512_set1_ps(7.0376836292e-2f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(-1.1514610310e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.1676998740e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(-1.2420140846e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.4249322787e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(-1.6668057665e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.0000714765e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(-2.4999993993e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(3.3333331174e-1f));
    p = _mm512_mul_ps(_mm512_mul_ps(p, f), square);
    p = _mm512_fmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), p);
    p = _mm512_fmadd_ps(square, _mm512_set1_ps(-0.5f), p);
    p = _mm512_fmadd_ps(n, _mm512_set1_ps(0.693359375f), _mm512_add_ps(p, f));
    return _mm512_mask_mov_ps(p, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x);
}

/* ---- keys and values ---- */

/* 16 rows of keys as [width / 4][16][4]; what is missing is 0. */
FOR_VNNI static void pack_keys(const struct nc_dynamic_attention *how, const float *k, int64_t key,
    const struct room *room)
{
    const int64_t rows = how->keys - key < 16 ? how->keys - key : 16, step = how->k_strides[2];
    const int64_t groups = up(how->width, 4) / 4;
    const __m512 amax = magnitudes(k + key * step, step, rows, how->width);
    const __mmask16 tiny = _mm512_cmp_ps_mask(amax, _mm512_set1_ps(TINY), _CMP_LT_OQ);
    const __m512 scale = _mm512_mask_mov_ps(_mm512_div_ps(amax, _mm512_set1_ps(127.0f)), tiny,
        _mm512_set1_ps(1.0f));
    float inverses[16];
    _mm512_storeu_ps(inverses, reciprocal(scale));
    _mm512_storeu_ps(room->key_scales + key, scale);
    int8_t *to = room->keys + key * groups * 4;
    __m512i sums = _mm512_setzero_si512();
    for (int64_t t = 0; t < groups; t += 16) {
        int8_t lines[16][64] = {{0}};
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < 64 && t * 4 + i < how->width; i += 16) {
                const __m512 x = _mm512_maskz_loadu_ps(lanes_of(how->width - t * 4 - i),
                    k + (key + r) * step + t * 4 + i);
                _mm_storeu_si128((__m128i *)(lines[r] + i),
                    _mm512_cvtsepi32_epi8(
                        _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverses[r])))));
            }
        __m512 x[16];
        UNROLL_16 for (int r = 0; r < 16; r++)
            x[r] = _mm512_loadu_ps(lines[r]);
        transpose(x);
        for (int64_t i = 0; i < 16 && t + i < groups; i++) {
            _mm512_storeu_ps(to + (t + i) * 64, x[i]);
            sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), _mm512_castps_si512(x[i]));
        }
    }
    _mm512_storeu_ps(room->key_sums + key, _mm512_cvtepi32_ps(sums));
}

/* Scales of all values, with what follows from them, as nc.numerics.dynamic.row_scales gives them. */
FOR_VNNI static void measure_values(const struct nc_dynamic_attention *how, const float *v,
    const struct room *room)
{
    const int64_t step = how->v_strides[2];
    const __m512 tiny = _mm512_set1_ps(TINY);
    __m512 others = _mm512_set1_ps(INFINITY);
    for (int64_t key = 0; key < how->keys; key += 16) {
        const __m512 amax = magnitudes(v + key * step, step, how->keys - key, how->wide);
        _mm512_storeu_ps(room->inverses + key, amax);
        others = _mm512_mask_min_ps(others, _mm512_cmp_ps_mask(amax, tiny, _CMP_GE_OQ), others, amax);
    }
    /* a row of zeros has the scale of the smallest other row, so that it widens no range */
    const float smallest = _mm512_reduce_min_ps(others);
    const __m512 least = _mm512_set1_ps(smallest < INFINITY ? smallest : 127.0f);
    for (int64_t key = 0; key < how->keys; key += 16) {
        const __m512 amax = _mm512_loadu_ps(room->inverses + key);
        const __mmask16 zeros = _mm512_cmp_ps_mask(amax, tiny, _CMP_LT_OQ);
        const __m512 scale = _mm512_div_ps(_mm512_mask_mov_ps(amax, zeros, least), _mm512_set1_ps(127.0f));
        _mm512_storeu_ps(room->logs + key, logarithm(scale));
        _mm512_storeu_ps(room->inverses + key, reciprocal(scale));
    }
}

/* 16 rows of values as [wide / 16][keys / 4][16][4]. */
FOR_VNNI static void pack_values(const struct nc_dynamic_attention *how, const float *v, int64_t key,
    const struct room *room)
{
    const int64_t rows = how->keys - key < 16 ? how->keys - key : 16, step = how->v_strides[2];
    const int64_t keys = up(how->keys, 16);
    const float *inverses = room->inverses + key;
    const __m512i byte = _mm512_set1_epi32(0xff);
    for (int64_t i = 0; i < how->wide; i += 16) {
        int8_t *to = room->values + i * keys + key * 16;
        for (int64_t r = 0; r < 16; r += 4) {
            __m512i codes[4];
            UNROLL_16 for (int j = 0; j < 4; j++)
            {
                const int64_t row = r + j < rows ? r + j : 0;
                const __m512 x = _mm512_maskz_loadu_ps(lanes_of(r + j < rows ? how->wide - i : 0),
                    v + (key + row) * step + i);
                const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(inverses[row])));
                codes[j] = _mm512_and_si512(byte, whole);
            }
            const __m512i low = _mm512_or_si512(codes[0], _mm512_slli_epi32(codes[1], 8)),
                          high = _mm512_or_si512(codes[2], _mm512_slli_epi32(codes[3], 8));
            _mm512_storeu_si512(to + r * 16, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }
}

/* ---- rows ---- */

INLINE FOR_VNNI __m256 half_of(__m512 x, int half)
{
    const __m512d bits = _mm512_castps_pd(x);
    return _mm256_castpd_ps(half ? _mm512_extractf64x4_pd(bits, 1) : _mm512_castpd512_pd256(bits));
}

/* What the codes of a row of queries mean: (code - zero) * scale. */
struct rounded {
    float scales[ROUNDED], zeros[ROUNDED];
};

/* Codes of some rows of queries, as nc.numerics.affine gives them. */
FOR_VNNI static void round_queries(const struct nc_dynamic_attention *how, const float *q, int64_t rows,
    const struct room *room, struct rounded *as)
{
    const int64_t step = how->q_strides[2], padded = up(how->width, 4);
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);
    __m512i most[16], least[16];
    for (int64_t r = 0; r < 16; r++) {
        most[r] = least[r] = _mm512_setzero_si512();
        for (int64_t i = 0; r < rows && i < how->width; i += 16) {
            const __m512i x = _mm512_castps_si512(
                _mm512_maskz_loadu_ps(lanes_of(how->width - i), q + r * step + i));
            most[r] = _mm512_max_epi32(most[r], x);
            least[r] = _mm512_max_epi32(least[r], _mm512_xor_si512(x, sign));
        }
    }
    const __m512 high = only_finite(largest_of_each(most)), low = only_finite(largest_of_each(least));
    float inverses[ROUNDED];
    for (int half = 0; half < 2; half++) { /* in float64, as there */
        const __m512d up = _mm512_cvtps_pd(half_of(high, half)), down = _mm512_cvtps_pd(half_of(low, half));
        const __mmask8 tiny = _mm512_cmp_pd_mask(_mm512_max_pd(up, down), _mm512_set1_pd(TINY), _CMP_LT_OQ);
        const __m512d scale = _mm512_mask_mov_pd(
            _mm512_div_pd(_mm512_add_pd(up, down), _mm512_set1_pd(255)), tiny, _mm512_set1_pd(1));
        const __m512d zero = _mm512_roundscale_pd(_mm512_maskz_div_pd((__mmask8)~tiny, down, scale),
            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m256 near = _mm512_cvtpd_ps(scale);
        _mm256_storeu_ps(as->scales + half * 8, near);
        _mm256_storeu_ps(as->zeros + half * 8, _mm512_cvtpd_ps(zero));
        _mm256_storeu_ps(inverses + half * 8, _mm256_div_ps(_mm256_set1_ps(1.0f), near));
    }
    for (int64_t r = 0; r < rows; r++) {
        const __m512 inverse = _mm512_set1_ps(inverses[r]);
        const __m512i zero = _mm512_cvtps_epi32(_mm512_set1_ps(as->zeros[r]));
        /* what is written behind a row is overwritten by the next */
        for (int64_t i = 0; i < how->width; i += 16) {
            const __m512 x = _mm512_maskz_loadu_ps(lanes_of(how->width - i), q + r * step + i);
            const __m512i codes = _mm512_add_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(x, inverse)), zero);
            _mm_storeu_si128((__m128i *)(room->queries + r * padded + i),
                _mm512_cvtusepi32_epi8(_mm512_max_epi32(codes, _mm512_setzero_si512())));
        }
    }
}

/* Some rows of one head, whose queries are rounded. */
struct rows {
    const uint8_t *queries;
    const float *scales, *zeros;
    const char *masks[SCORE_ROWS];
    float *y[SCORE_ROWS];
};

/* score + ln v of `rows` rows with `blocks` blocks of keys, and the largest of each row. */
INLINE FOR_VNNI void score(const int rows, const int blocks, const struct nc_dynamic_attention *how,
    const struct room *room, const struct rows *of, int64_t block, __m512 *most)
{
    const int64_t groups = up(how->width, 4) / 4, keys = up(how->keys, 16);
    __m512i sums[SCORE_ROWS][BLOCKS_AT_ONCE];
    const int8_t *right = room->keys + block * groups * 64;
    multiply(rows, blocks, of->queries, groups * 4, right, groups * 64, groups, sums);
    for (int c = 0; c < blocks; c++) {
        const int64_t key = (block + c) * 16;
        const __m512 of_keys = _mm512_loadu_ps(room->key_sums + key),
                     scale = _mm512_loadu_ps(room->key_scales + key),
                     log = _mm512_loadu_ps(room->logs + key);
        for (int r = 0; r < rows; r++) {
            const __m512 zero = _mm512_set1_ps(of->zeros[r]),
                         factor = _mm512_set1_ps(of->scales[r] * (float)how->factor);
            const __m512 exact = _mm512_fnmadd_ps(zero, of_keys, _mm512_cvtepi32_ps(sums[r][c]));
            __m512 x = _mm512_fmadd_ps(_mm512_mul_ps(exact, scale), factor, log);
            if (how->mask != MASK_NONE || key + 16 > how->keys)
                x = masked(how->mask, of->masks[r], how->mask_strides[3], key, how->keys - key, x);
            most[r] = _mm512_max_ps(x, most[r]);
            _mm512_storeu_ps(room->scores + r * keys + key, x);
        }
    }
}

INLINE FOR_VNNI int has_no_number(const float *x, int64_t n)
{
    __mmask16 found = 0;
    for (int64_t i = 0; i < n; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        found |= _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    }
    return found != 0;
}

/* Codes of `rows` rows of probabilities, and 1 / their sums. A row that sees no key gets zeros, as from
 * torch. */
INLINE FOR_VNNI void weigh_scores(const int rows, const struct nc_dynamic_attention *how,
    const struct room *room, const __m512 *most, float *inverses)
{
    const int64_t keys = up(how->keys, 16);
    const float log_255 = 5.541263545f;
    __m512 sums[SCORE_ROWS], top[SCORE_ROWS];
    int unseen = 0;
    for (int r = 0; r < rows; r++) {
        const float largest = _mm512_reduce_max_ps(most[r]);
        unseen |= (largest == -INFINITY) << r;
        sums[r] = _mm512_setzero_ps();
        top[r] = _mm512_set1_ps(largest - log_255);
    }
    for (int64_t i = 0; i < keys; i += 16) {
        const __m512 inverse = _mm512_loadu_ps(room->inverses + i);
        for (int r = 0; r < rows; r++) {
            const __m512 x = _mm512_sub_ps(_mm512_loadu_ps(room->scores + r * keys + i), top[r]);
            /* what is below e^-87 would be e^-87, and 1 / v may be large */
            const __m512 e = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ),
                exponential_of_16(x));
            sums[r] = _mm512_fmadd_ps(e, inverse, sums[r]);
            _mm_storeu_si128((__m128i *)(room->codes + r * keys + i),
                _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(e)));
        }
    }
    for (int r = 0; r < rows; r++) {
        inverses[r] = 1 / _mm512_reduce_add_ps(sums[r]);
        if (unseen >> r & 1 && !has_no_number(room->scores + r * keys, keys)) {
            memset(room->codes + r * keys, 0, (size_t)keys);
            inverses[r] = 0;
        }
    }
}

/* The results of `rows` rows and `blocks` blocks of columns. */
INLINE FOR_VNNI void weigh_values(const int rows, const int blocks, const struct nc_dynamic_attention *how,
    const struct room *room, const struct rows *of, const float *inverses, int64_t block)
{
    const int64_t keys = up(how->keys, 16);
    __m512i sums[SCORE_ROWS][BLOCKS_AT_ONCE];
    multiply(rows, blocks, room->codes, keys, room->values + block * keys * 16, keys * 16, keys / 4, sums);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < blocks; c++) {
            const int64_t column = (block + c) * 16;
            _mm512_mask_storeu_ps(of->y[r] + column, lanes_of(how->wide - column),
                _mm512_mul_ps(_mm512_cvtepi32_ps(sums[r][c]), _mm512_set1_ps(inverses[r])));
        }
}

INLINE FOR_VNNI void attend(const int rows, const struct nc_dynamic_attention *how, const struct room *room,
    const struct rows *of)
{
    const int64_t blocks = up(how->keys, 16) / 16, columns = up(how->wide, 16) / 16;
    __m512 most[SCORE_ROWS];
    float inverses[SCORE_ROWS];
    int64_t block = 0;
    for (int r = 0; r < rows; r++)
        most[r] = _mm512_set1_ps(-INFINITY);
    for (; block + 4 <= blocks; block += 4)
        score(rows, 4, how, room, of, block, most);
    for (; block < blocks; block++)
        score(rows, 1, how, room, of, block, most);
    weigh_scores(rows, how, room, most, inverses);
    for (block = 0; block + 4 <= columns; block += 4)
        weigh_values(rows, 4, how, room, of, inverses, block);
    if (block + 2 <= columns) {
        weigh_values(rows, 2, how, room, of, inverses, block);
        block += 2;
    }
    if (block < columns)
        weigh_values(rows, 1, how, room, of, inverses, block);
}

FOR_VNNI static void attend_some(const int64_t rows, const struct nc_dynamic_attention *how,
    const struct room *room, const struct rows *of)
{
    if (rows == SCORE_ROWS)
        attend(SCORE_ROWS, how, room, of);
    else
        for (int64_t r = 0; r < rows; r++) {
            const struct rows one = {of->queries + r * up(how->width, 4), of->scales + r, of->zeros + r,
                {of->masks[r]}, {of->y[r]}};
            attend(1, how, room, &one);
        }
}

/* Queries, keys and values of one head. */
struct head {
    const float *q, *k, *v;
};

static struct head head_of(const struct job *job, int64_t which)
{
    const struct nc_dynamic_attention *how = job->how;
    const int64_t batch = which / how->heads, head = which % how->heads;
    return (struct head){
        (const float *)job->tensors[1] + batch * how->q_strides[0] + head * how->q_strides[1],
        (const float *)job->tensors[2] + batch * how->k_strides[0] + head * how->k_strides[1],
        (const float *)job->tensors[3] + batch * how->v_strides[0] + head * how->v_strides[1],
    };
}

/* Fetch some rows of a tensor: they lie so far apart that the CPU does not see which come next. */
INLINE FOR_VNNI void fetch(const float *x, int64_t step, int64_t first, int64_t end, int64_t n)
{
    for (int64_t row = first; row < end; row++)
        for (int64_t i = 0; i < n; i += 16)
            _mm_prefetch((const char *)(x + row * step + i), _MM_HINT_T1);
}

/* Codes of keys and values of a head. */
FOR_VNNI static void pack_head(const struct nc_dynamic_attention *how, const struct head *of,
    const struct room *room)
{
    measure_values(how, of->v, room);
    for (int64_t key = 0; key < how->keys; key += 16) {
        pack_keys(how, of->k, key, room);
        pack_values(how, of->v, key, room);
    }
}

/* ROUNDED rows of a head, or those that are left. */
FOR_VNNI static void attend_rounded(const struct job *job, const struct room *room, const struct head *of_head,
    int64_t batch, int64_t head, int64_t first, int64_t rows)
{
    const struct nc_dynamic_attention *how = job->how;
    const int64_t padded = up(how->width, 4);
    struct rounded as;
    round_queries(how, of_head->q + first * how->q_strides[2], rows, room, &as);
    for (int64_t r = 0; r < rows; r += SCORE_ROWS) {
        const int64_t some = rows - r < SCORE_ROWS ? rows - r : SCORE_ROWS;
        struct rows of = {room->queries + r * padded, as.scales + r, as.zeros + r, {0}, {0}};
        for (int64_t i = 0; i < some; i++) {
            const int64_t *m = how->mask_strides, *y = how->y_strides, row = first + r + i;
            const int64_t at = batch * m[0] + head * m[1] + row * m[2];
            const int64_t bytes = how->mask == MASK_FLOAT ? 4 : 1;
            of.masks[i] = how->mask == MASK_NONE ? NULL : job->tensors[5] + at * bytes;
            of.y[i] = (float *)job->tensors[0] + batch * y[0] + head * y[1] + row * y[2];
        }
        attend_some(some, how, room, &of);
    }
}

FOR_VNNI static void work(void *data, int64_t part, int64_t parts)
{
    const struct job *job = data;
    const struct nc_dynamic_attention *how = job->how;
    const int64_t pieces = how->parts, tasks = how->batch * how->heads * pieces;
    const int64_t last = tasks * (part + 1) / parts;
    const struct room room = room_of(job->tensors[4] + part * how->bytes, how);
    int64_t packed = -1;
    for (int64_t task = tasks * part / parts; task < last; task++) {
        const int64_t which = task / pieces, batch = which / how->heads, head = which % how->heads,
            piece = task % pieces;
        const struct head of_head = head_of(job, which);
        if (which != packed)
            pack_head(how, &of_head, &room);
        packed = which;
        const int64_t begin = how->rows * piece / pieces, end = how->rows * (piece + 1) / pieces;
        const int64_t blocks = up(end - begin, ROUNDED) / ROUNDED, next = (last - 1) / pieces;
        const struct head then = head_of(job, which < next ? which + 1 : which);
        for (int64_t block = 0; block < blocks; block++) {
            const int64_t first = begin + block * ROUNDED;
            const int64_t rows = end - first < ROUNDED ? end - first : ROUNDED;
            if (pieces == 1) {
                const int64_t from = how->keys * block / blocks, to = how->keys * (block + 1) / blocks;
                fetch(then.k, how->k_strides[2], from, to, how->width);
                fetch(then.v, how->v_strides[2], from, to, how->wide);
                fetch(then.q, how->q_strides[2], first, first + rows, how->width);
            }
            attend_rounded(job, &room, &of_head, batch, head, first, rows);
        }
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

FOR_VNNI static void attend_text(void *data, int64_t text, int64_t head, int64_t first, int64_t end)
{
    const struct part_of_texts *part = data;
    char *const *given = part->all->job->tensors;
    const int64_t begin = part->all->texts.starts[text];
    struct nc_dynamic_attention how = *part->all->job->how;
    how.rows = how.keys = part->all->texts.starts[text + 1] - begin;
    char *tensors[6] = {given[0] + begin * how.y_strides[2] * 4, given[1] + begin * how.q_strides[2] * 4,
        given[2] + begin * how.k_strides[2] * 4, given[3] + begin * how.v_strides[2] * 4};
    tensors[5] = how.mask == MASK_NONE ? NULL : given[5];
    const struct job job = {&how, tensors};
    const struct room room = room_of(part->room, &how);
    const struct head of_head = head_of(&job, head);
    pack_head(&how, &of_head, &room);
    for (; first < end; first += ROUNDED)
        attend_rounded(&job, &room, &of_head, 0, head, first, end - first < ROUNDED ? end - first : ROUNDED);
}

static void work_on_texts(void *data, int64_t part, int64_t parts)
{
    const struct on_texts *all = data;
    struct part_of_texts mine = {all, all->job->tensors[4] + part * all->job->how->bytes};
    each_text(&all->texts, attend_text, &mine, part, parts);
}

/* tensors: y, q, k, v in fp32; memory for all threads, of 64-byte pieces; the mask, bool or fp32; with `texts`
 * where each of `batch` texts begins, int32 */
int nc_dynamic_attention(const struct nc_dynamic_attention *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_dynamic_attention);
    const struct job job = {how, tensors};
    EXPECT(nc_may_use() >> ISA_AVX512_VNNI & 1, NOT_HERE);
    EXPECT(how->mask >= MASK_NONE && how->mask <= MASK_FLOAT, OTHER_OPERATION);
    EXPECT(count == 5 + (how->mask != MASK_NONE) + (how->texts != 0), OTHER_TENSORS);
    EXPECT(how->batch >= 0 && how->heads >= 0 && how->rows >= 0 && how->threads > 0, OTHER_SIZE);
    /* more codes could sum to more than int32 or fp32 hold exactly */
    EXPECT(how->width > 0 && how->width <= WIDEST_HEAD, OTHER_SIZE);
    EXPECT(how->keys > 0 && how->keys <= MOST_INPUTS, OTHER_SIZE);
    EXPECT(how->wide > 0 && how->parts > 0, OTHER_SIZE);
    EXPECT(bytes_of_room(how) <= how->bytes, OTHER_SIZE);
    const struct on_texts texts = {&job, {(const int32_t *)tensors[count - 1], how->batch, how->heads}};
    const int wrong = how->texts ? check_texts(&texts.texts, how->rows, how->keys) : OK;
    EXPECT(!wrong, wrong);
    const int64_t products = how->texts ? cost_of_texts(&texts.texts)
                                        : how->batch * how->heads * how->rows * how->keys;
    /* as much work as some ten thousand products is done before other threads wake up */
    const int64_t worth = 1 + products * (how->width + how->wide) / 262144;
    if (how->texts)
        in_parts(work_on_texts, (void *)&texts, worth, how->threads);
    else
        in_parts(work, (void *)&job, worth, how->threads);
    return OK;
}

CODE_FOR(1 << ISA_AVX512_VNNI)
