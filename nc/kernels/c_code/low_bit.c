/* Linears with weights in a few bits: y = x W^T + bias, with
 * W[n, k] = scale[n, g] * value(code[n, k]) + offset[n, g].
 *
 * The layout of a weight, the same for all instruction sets, is made of panels of 16 outputs:
 *   4 bits: [panel][K / 8][16 outputs] words of 32 bits; byte i of a word has code k + i in its low half and
 *           code k + 4 + i in its high half
 *   8 bits: [panel][K / 4][16 outputs] words of 32 bits; byte i of a word is code k + i
 *   scales: [panel][group][16 outputs], fp32, fp16 or bf16; offsets likewise, fp32
 * N is padded to a multiple of 16, and a row of K that is one group to a multiple of 32.
 *
 * Four forms:
 *   fp32    codes become fp32 in registers (4 bits: by a table of 16 values; 8 bits: code - middle),
 *           multiplied and summed in fp32
 *   int8    x is rounded to int8 with one scale for each block of its row; products are summed in int32 for
 *           each block: this is exact
 *   digits  as int8, but x is three digits of 8 bits, d2 * 2^16 + d1 * 2^8 + d0, times a power of two for
 *           each block: at most 2^-23 of the largest value of the block is lost, as much as fp32 sums lose.
 *           With VNNI this takes fewer instructions than fp32
 *   bf16    x is bf16, and so are 4-bit codes - middle, exactly: products of pairs are summed in fp32
 */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "caches.h"
#include "calls.h"
#include "isa.h"
#include "openmp.h"
#include "low_bit_threads.h"
#include "tiles.h"

#define DIGITS 3 /* of 8 bits, for fp32 */
#define TINY_AMAX 0x1p-100f /* as in nc.numerics.affine */

struct weight {
    int64_t outputs, inputs, padded; /* N, K, and K as it is stored */
    int64_t group;                   /* input channels that share a scale */
    int64_t bits, middle;            /* of a code: 4 or 8; the code of 0, for the int8 form and for 8 bits */
    const uint8_t *codes;
    const void *scale;
    const float *offset; /* may be null */
    const float *table; /* 16 values of 4-bit codes */
    int64_t scale_dtype;
};

struct job {
    struct weight w;
    const float *x;     /* [rows, K] */
    int64_t rows, stride; /* of x, in elements */
    float *y;           /* [rows, N] */
    const float *bias;  /* [N] or null */
    int64_t held;       /* rows, or a few more: distance of what the next two have for each group and block */
    /* [groups, rows]: sums of x as it is multiplied over a group, 0 at first; only with offsets */
    float *group_sums;
    /* forms int8 and digits */
    int64_t block, blocks; /* elements of a block, blocks in a row */
    int per_token;         /* one scale for all blocks of a row */
    _Atomic int *unfit;    /* set where x can't be split, by any thread */
    /* [rows, digits, padded], or for tiles [rows / 16, digits, padded / 64, 16, 64]; one digit in the int8
     * form; or bf16, or fp32, see tile_rows */
    int8_t *codes;
    int64_t plane, row;    /* bytes of a digit of a row, and of a row */
    int tiled;
    float *block_scale;    /* [blocks, rows] */
    int32_t *block_start;  /* [rows, blocks, digits]: - middle * sum of the codes, where sums start */
};

/* Where byte k of digit d of row m of x is. */
static inline int8_t *codes_at(const struct job *j, int64_t m, int64_t d, int64_t k)
{
    if (j->tiled)
        return j->codes + m / 16 * 16 * j->row + 16 * d * j->plane + k / 64 * 1024 + m % 16 * 64 + k % 64;
    return j->codes + m * j->row + d * j->plane + k;
}

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define FOR_AVX2 FOR_CPU("avx2,fma,f16c")
#define FOR_AVX512 FOR_CPU("avx2,fma,f16c,avx512f,avx512bw,avx512vl")
#define FOR_VNNI FOR_CPU("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")
#if HAS_BF16
#define FOR_BF16 FOR_CPU("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16")
#endif
#define UNROLL _Pragma("GCC unroll 16")

static inline int32_t word(const void *p)
{
    int32_t v;
    memcpy(&v, p, 4);
    return v;
}

/* ---- rounding of x ---- */

/* The largest magnitude; not a number where there is one, or an infinite one. */
FOR_AVX2 static float largest(const float *x, int64_t count)
{
    __m256 most = _mm256_setzero_ps(), bad = _mm256_setzero_ps(), sign = _mm256_set1_ps(-0.0f);
    float amax = 0, unfit = 0, lanes[8];
    int64_t k = 0;
    for (; k + 8 <= count; k += 8) {
        __m256 v = _mm256_loadu_ps(x + k);
        most = _mm256_max_ps(most, _mm256_andnot_ps(sign, v));
        bad = _mm256_fmadd_ps(v, _mm256_setzero_ps(), bad);
    }
    _mm256_storeu_ps(lanes, most);
    for (int i = 0; i < 8; i++)
        amax = lanes[i] > amax ? lanes[i] : amax;
    _mm256_storeu_ps(lanes, bad);
    for (int i = 0; i < 8; i++)
        unfit += lanes[i];
    for (; k < count; k++) {
        amax = fabsf(x[k]) > amax ? fabsf(x[k]) : amax;
        unfit += x[k] * 0;
    }
    return unfit == 0 ? amax : NAN;
}

/* As choose_qparams of nc.numerics.affine: symmetric, 127 codes on each side; not a number where x has one or
 * is infinite. */
static float int8_scale(float amax)
{
    return amax < TINY_AMAX ? 1.0f : (float)((double)amax / 127);
}

/* Codes of `count` elements, 0 behind them up to `padded`; returns their sum. */
FOR_AVX2 static int32_t round_block(const float *x, int64_t count, int64_t padded, float scale, int8_t *codes)
{
    __m256 by = _mm256_set1_ps(scale);
    __m256i sums = _mm256_setzero_si256(), high = _mm256_set1_epi32(127), low = _mm256_set1_epi32(-127);
    int32_t sum = 0, lanes[8];
    int64_t k = 0;
    if (!(scale == scale)) {
        memset(codes, 0, padded);
        return 0;
    }
    for (; k + 8 <= count; k += 8) {
        __m256i q = _mm256_cvtps_epi32(_mm256_div_ps(_mm256_loadu_ps(x + k), by));
        q = _mm256_min_epi32(_mm256_max_epi32(q, low), high);
        sums = _mm256_add_epi32(sums, q);
        __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(q), _mm256_extracti128_si256(q, 1));
        _mm_storel_epi64((__m128i *)(codes + k), _mm_packs_epi16(words, words));
    }
    _mm256_storeu_si256((__m256i *)lanes, sums);
    for (int i = 0; i < 8; i++)
        sum += lanes[i];
    for (; k < count; k++) {
        long q = lrintf(x[k] / scale);
        codes[k] = (int8_t)(q > 127 ? 127 : q < -127 ? -127 : q);
        sum += codes[k];
    }
    if (padded > count)
        memset(codes + count, 0, padded - count);
    return sum;
}

/* Rounds rows: codes, scales and starts of blocks, and where there are offsets the sums of groups. */
static void round_rows(const struct job *j, int64_t start, int64_t stop)
{
    int64_t groups = j->w.padded / j->w.group, each = j->blocks / groups;
    for (int64_t m = start; m < stop; m++) {
        const float *x = j->x + m * j->stride;
        float scale = j->per_token ? int8_scale(largest(x, j->w.inputs)) : 0;
        for (int64_t b = 0; b < j->blocks; b++) {
            int64_t at = b * j->block, padded = j->w.padded - at < j->block ? j->w.padded - at : j->block;
            int64_t count = j->w.inputs - at < padded ? j->w.inputs - at : padded;
            if (!j->per_token)
                scale = int8_scale(largest(x + at, count));
            int32_t sum = 0;
            for (int64_t k = 0, next; k < padded; k = next) {
                next = j->tiled ? (at + k) / 64 * 64 + 64 - at : padded; /* what lies in one piece */
                next = next < padded ? next : padded;
                int64_t here = count - k < next - k ? count - k : next - k;
                sum +=
                    round_block(x + at + k, here > 0 ? here : 0, next - k, scale, codes_at(j, m, 0, at + k));
            }
            j->block_scale[b * j->held + m] = scale;
            j->block_start[m * j->blocks + b] = (int32_t)(-j->w.middle * sum);
            if (j->group_sums)
                j->group_sums[b / each * j->held + m] += scale * (float)sum;
        }
    }
}

/* Digits of `count` elements, in planes of `plane` bytes, and their sums. */
FOR_AVX2 static void split_block(const float *x, int64_t count, float inverse, int8_t *codes, int64_t plane,
    int32_t *sums)
{
    for (int64_t k = 0; k < count; k += 8) {
        __m256i left = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + k), _mm256_set1_ps(inverse)));
        for (int d = 0; d < DIGITS; d++) {
            __m256i digit = _mm256_srai_epi32(_mm256_slli_epi32(left, 24), 24);
            left = _mm256_srai_epi32(_mm256_sub_epi32(left, digit), 8);
            __m128i words =
                _mm_packs_epi32(_mm256_castsi256_si128(digit), _mm256_extracti128_si256(digit, 1));
            _mm_storel_epi64((__m128i *)(codes + d * plane + k), _mm_packs_epi16(words, words));
            __m128i ones = _mm_madd_epi16(words, _mm_set1_epi16(1));
            ones = _mm_add_epi32(ones, _mm_unpackhi_epi64(ones, ones));
            sums[d] += _mm_cvtsi128_si32(ones) + _mm_extract_epi32(ones, 1);
        }
    }
}

/* Splits rows into digits, as round_rows rounds them. */
static void split_rows(const struct job *j, int64_t start, int64_t stop)
{
    int64_t groups = j->w.padded / j->w.group, each = j->blocks / groups;
    for (int64_t m = start; m < stop; m++) {
        for (int64_t b = 0; b < j->blocks; b++) {
            int64_t at = b * j->block, padded = j->w.padded - at < j->block ? j->w.padded - at : j->block;
            const float *x = j->x + m * j->stride + at;
            int32_t sums[DIGITS] = {0};
            int exponent;
            float amax = largest(x, padded);
            if (!(amax == amax)) { /* what three digits can't hold */
                atomic_store_explicit(j->unfit, 1, memory_order_relaxed);
                return;
            }
            frexpf(amax, &exponent);
            exponent = (exponent < -90 ? -90 : exponent) - 23;
            if (amax * ldexpf(1, -exponent) > 127 * 0x10101)
                exponent++;
            for (int64_t k = 0, next; k < padded; k = next) {
                next = j->tiled ? (at + k) / 64 * 64 + 64 - at : padded;
                next = next < padded ? next : padded;
                split_block(x + k, next - k, ldexpf(1, -exponent), codes_at(j, m, 0, at + k),
                    (j->tiled ? 16 : 1) * j->plane, sums);
            }
            j->block_scale[b * j->held + m] = ldexpf(1, exponent);
            for (int d = 0; d < DIGITS; d++)
                j->block_start[(m * j->blocks + b) * DIGITS + d] = (int32_t)(-j->w.middle * sums[d]);
            if (j->group_sums)
                j->group_sums[b / each * j->held + m] +=
                    ldexpf((float)(sums[2] * 65536.0 + sums[1] * 256.0 + sums[0]), exponent);
        }
    }
}

/* Rows of bf16 in the order in which the codes of 8 input channels come out of a word. */
static void order_rows(const struct job *j, int64_t start, int64_t stop)
{
    static const int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    for (int64_t m = start; m < stop; m++) {
        for (int64_t k = 0; k < j->w.padded; k += 8) {
            uint16_t *to = (uint16_t *)codes_at(j, m, 0, 2 * k);
            for (int i = 0; i < 8; i++)
                to[i] = (uint16_t)((uint32_t)word(j->x + m * j->stride + k + order[i]) >> 16);
        }
    }
}

/* Sums of the groups of rows, for the fp32 form. */
FOR_AVX2 static void sum_rows(const struct job *j, int64_t start, int64_t stop)
{
    int64_t groups = j->w.padded / j->w.group;
    for (int64_t m = start; m < stop; m++)
        for (int64_t g = 0; g < groups; g++) {
            const float *x = j->x + m * j->stride + g * j->w.group;
            __m256 sums = _mm256_setzero_ps();
            float sum = 0, lanes[8];
            for (int64_t k = 0; k < j->w.group; k += 8)
                sums = _mm256_add_ps(sums, _mm256_loadu_ps(x + k));
            _mm256_storeu_ps(lanes, sums);
            for (int i = 0; i < 8; i++)
                sum += lanes[i];
            j->group_sums[g * j->held + m] = sum;
        }
}

/* ---- AVX-512: P panels times R rows ---- */

/* 16 scales from element `at` on. */
INLINE FOR_AVX512 __m512 scales_512(const struct weight *w, int64_t at)
{
    const uint16_t *half = (const uint16_t *)w->scale + at;
    if (w->scale_dtype == DTYPE_F16)
        return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)half));
    if (w->scale_dtype == DTYPE_BF16)
        return _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)half)), 16));
    return _mm512_loadu_ps((const float *)w->scale + at);
}

INLINE FOR_AVX512 void finish_512(const struct job *j, int64_t p, int64_t m, __m512 sum)
{
    int64_t left = j->w.outputs - p * PANEL;
    __mmask16 mask = left >= PANEL ? 0xffff : (__mmask16)((1u << left) - 1);
    if (j->bias)
        sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, j->bias + p * PANEL));
    _mm512_mask_storeu_ps(j->y + m * j->w.outputs + p * PANEL, mask, sum);
}

/* The end of a group: with offsets, each adds its part. */
#define ADD_OFFSETS_512()                                                                              \
    if (j->w.offset)                                                                                   \
        UNROLL for (int v = 0; v < P; v++) UNROLL for (int r = 0; r < R; r++)                          \
            sum[r][v] = _mm512_fmadd_ps(_mm512_loadu_ps(j->w.offset + ((p + v) * groups + g) * PANEL), \
                _mm512_set1_ps(j->group_sums[g * j->held + m + r]), sum[r][v]);

/* `ahead`: ask for the codes of one row before they are read; CPUs differ in what that gains
 * (benchmarks/lowbit_kernels.py). */
INLINE FOR_VNNI void integers_512(const struct job *j, int64_t p, int64_t m, const int P, const int R,
    const int bits, const int D, const int ahead)
{
    const int64_t groups = j->w.padded / j->w.group, each = j->blocks / groups,
        panel = j->w.padded * 2 * bits;
    const __m512i half = _mm512_set1_epi8(15);
    const int C = P * R == 1 ? 2 : 1; /* chains of sums: one alone would wait for itself */
    const uint8_t *codes[2];
    __m512 sum[4][2];
    UNROLL for (int v = 0; v < P; v++)
    {
        codes[v] = j->w.codes + (p + v) * panel;
        UNROLL for (int r = 0; r < R; r++) sum[r][v] = _mm512_setzero_ps();
    }
    for (int64_t g = 0, b = 0; g < groups; g++) {
        __m512 scale[2];
        UNROLL for (int v = 0; v < P; v++) scale[v] = scales_512(&j->w, ((p + v) * groups + g) * PANEL);
        for (int64_t end = b + each; b < end; b++) {
            int64_t k = b * j->block, stop = k + j->block < j->w.padded ? k + j->block : j->w.padded;
            __m512i acc[4][2][DIGITS][2];
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < P; v++)
                UNROLL for (int d = 0; d < D; d++)
            {
                acc[r][v][d][0] = _mm512_set1_epi32(j->block_start[((m + r) * j->blocks + b) * D + d]);
                acc[r][v][d][1] = _mm512_setzero_si512();
            }
            for (; k < stop; k += 8) {
                __m512i low[2], high[2];
                UNROLL for (int v = 0; v < P; v++)
                {
                    const uint8_t *at = codes[v] + k * 2 * bits;
                    if (R == 1 && ahead) {
                        _mm_prefetch((const char *)at + 2048, _MM_HINT_T0);
                        if (bits == 8)
                            _mm_prefetch((const char *)at + 2048 + 64, _MM_HINT_T0);
                    }
                    if (bits == 4) {
                        __m512i both = _mm512_loadu_si512(at);
                        low[v] = _mm512_and_si512(both, half);
                        high[v] = _mm512_and_si512(_mm512_srli_epi32(both, 4), half);
                    } else {
                        low[v] = _mm512_loadu_si512(at);
                        high[v] = _mm512_loadu_si512(at + 64);
                    }
                }
                UNROLL for (int r = 0; r < R; r++) UNROLL for (int d = 0; d < D; d++)
                {
                    const int8_t *x = j->codes + (m + r) * j->row + d * j->plane + k;
                    __m512i first = _mm512_set1_epi32(word(x)), second = _mm512_set1_epi32(word(x + 4));
                    UNROLL for (int v = 0; v < P; v++)
                        acc[r][v][d][0] = _mm512_dpbusd_epi32(acc[r][v][d][0], low[v], first);
                    UNROLL for (int v = 0; v < P; v++)
                        acc[r][v][d][C - 1] = _mm512_dpbusd_epi32(acc[r][v][d][C - 1], high[v], second);
                }
            }
            UNROLL for (int r = 0; r < R; r++)
            {
                __m512 by = _mm512_set1_ps(j->block_scale[b * j->held + m + r]);
                UNROLL for (int v = 0; v < P; v++)
                {
                    if (C == 2)
                        UNROLL for (int d = 0; d < D; d++)
                            acc[r][v][d][0] = _mm512_add_epi32(acc[r][v][d][0], acc[r][v][d][1]);
                    __m512 value = _mm512_cvtepi32_ps(acc[r][v][D - 1][0]);
                    UNROLL for (int d = D - 2; d >= 0; d--)
                        value =
                            _mm512_fmadd_ps(value, _mm512_set1_ps(256), _mm512_cvtepi32_ps(acc[r][v][d][0]));
                    sum[r][v] = _mm512_fmadd_ps(_mm512_mul_ps(value, by), scale[v], sum[r][v]);
                }
            }
        }
        ADD_OFFSETS_512()
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < P; v++)
        finish_512(j, p + v, m + r, sum[r][v]);
}

INLINE FOR_VNNI void int8_512(const struct job *j, int64_t p, int64_t m, const int P, const int R,
    const int bits)
{
    integers_512(j, p, m, P, R, bits, 1, 0);
}

INLINE FOR_VNNI void int8_ahead_512(const struct job *j, int64_t p, int64_t m, const int P, const int R,
    const int bits)
{
    integers_512(j, p, m, P, R, bits, 1, 1);
}

/* Two rows at once: sums of three digits of four would not fit into the registers. */
INLINE FOR_VNNI void split_512(const struct job *j, int64_t p, int64_t m, const int P, const int R,
    const int bits, const int ahead)
{
    for (int r = 0; r + 2 <= R; r += 2)
        integers_512(j, p, m + r, P, 2, bits, DIGITS, ahead);
    if (R == 1)
        integers_512(j, p, m, P, 1, bits, DIGITS, ahead);
}

INLINE FOR_VNNI void digits_512(const struct job *j, int64_t p, int64_t m, const int P, const int R,
    const int bits)
{
    split_512(j, p, m, P, R, bits, bits == 4);
}

INLINE FOR_VNNI void digits_ahead_512(const struct job *j, int64_t p, int64_t m, const int P, const int R,
    const int bits)
{
    split_512(j, p, m, P, R, bits, 1);
}

INLINE FOR_AVX512 void fp32_512(const struct job *j, int64_t p, int64_t m, const int P, const int R,
    const int bits)
{
    const int64_t groups = j->w.padded / j->w.group, panel = j->w.padded * 2 * bits;
    const __m512 table = bits == 4 ? _mm512_loadu_ps(j->w.table) : _mm512_setzero_ps();
    const __m512i middle = _mm512_set1_epi8((char)j->w.middle);
    const uint8_t *codes[2];
    __m512 sum[4][2];
    UNROLL for (int v = 0; v < P; v++)
    {
        codes[v] = j->w.codes + (p + v) * panel;
        UNROLL for (int r = 0; r < R; r++) sum[r][v] = _mm512_setzero_ps();
    }
    for (int64_t g = 0; g < groups; g++) {
        __m512 even[4][2], odd[4][2]; /* two chains of sums: one alone would wait for itself */
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < P; v++)
            even[r][v] = odd[r][v] = _mm512_setzero_ps();
        for (int64_t k = g * j->w.group; k < (g + 1) * j->w.group; k += 8) {
            __m512i low[2], high[2];
            UNROLL for (int v = 0; v < P; v++)
            {
                const uint8_t *at = codes[v] + k * 2 * bits;
                if (R == 1 && bits == 4)
                    _mm_prefetch((const char *)at + 2048, _MM_HINT_T0);
                low[v] = _mm512_loadu_si512(at);
                if (bits == 4) {
                    high[v] = _mm512_srli_epi32(low[v], 4);
                } else {
                    low[v] = _mm512_sub_epi8(low[v], middle);
                    high[v] = _mm512_sub_epi8(_mm512_loadu_si512(at + 64), middle);
                }
            }
            UNROLL for (int i = 0; i < 4; i++) UNROLL for (int v = 0; v < P; v++)
            {
                __m512 first, second;
                if (bits == 4) {
                    first = _mm512_permutexvar_ps(_mm512_srli_epi32(low[v], 8 * i), table);
                    second = _mm512_permutexvar_ps(_mm512_srli_epi32(high[v], 8 * i), table);
                } else {
                    first = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(low[v], 24 - 8 * i), 24));
                    second =
                        _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(high[v], 24 - 8 * i), 24));
                }
                UNROLL for (int r = 0; r < R; r++)
                {
                    const float *x = j->x + (m + r) * j->stride + k + i;
                    even[r][v] = _mm512_fmadd_ps(first, _mm512_set1_ps(x[0]), even[r][v]);
                    odd[r][v] = _mm512_fmadd_ps(second, _mm512_set1_ps(x[4]), odd[r][v]);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < P; v++)
            sum[r][v] = _mm512_fmadd_ps(_mm512_add_ps(even[r][v], odd[r][v]),
                                        scales_512(&j->w, ((p + v) * groups + g) * PANEL), sum[r][v]);
        ADD_OFFSETS_512()
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < P; v++)
        finish_512(j, p + v, m + r, sum[r][v]);
}

#if HAS_BF16
INLINE FOR_BF16 void bf16_512(const struct job *j, int64_t p, int64_t m, const int P, const int R,
    const int bits)
{
    const int64_t groups = j->w.padded / j->w.group, panel = j->w.padded * 2 * bits;
    const int C = R > 2 ? 1 : 2; /* chains of sums: one alone would wait for itself */
    const __m256i values = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_loadu_si512(j->w.table), 16));
    /* twice: bit 4 of an index belongs to the next code */
    const __m512i table = _mm512_broadcast_i64x4(values);
    const uint8_t *codes[2];
    __m512 sum[6][2];
    UNROLL for (int v = 0; v < P; v++)
    {
        codes[v] = j->w.codes + (p + v) * panel;
        UNROLL for (int r = 0; r < R; r++) sum[r][v] = _mm512_setzero_ps();
    }
    for (int64_t g = 0; g < groups; g++) {
        __m512 acc[6][2][2];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < P; v++)
            acc[r][v][0] = acc[r][v][1] = _mm512_setzero_ps();
        for (int64_t k = g * j->w.group; k < (g + 1) * j->w.group; k += 8) {
            __m512i found[2];
            UNROLL for (int v = 0; v < P; v++)
            {
                const uint8_t *at = codes[v] + k * 2 * bits;
                found[v] = _mm512_loadu_si512(at);
            }
            UNROLL for (int i = 0; i < 4; i++)
            {
                __m512i pair[2];
                UNROLL for (int v = 0; v < P; v++)
                    pair[v] = _mm512_permutexvar_epi16(_mm512_srli_epi16(found[v], 4 * i), table);
                UNROLL for (int r = 0; r < R; r++)
                {
                    __m512i x = _mm512_set1_epi32(word(j->codes + (m + r) * j->row + 2 * k + 4 * i));
                    UNROLL for (int v = 0; v < P; v++)
                        acc[r][v][i % C] = _mm512_dpbf16_ps(acc[r][v][i % C], (__m512bh)pair[v], (__m512bh)x);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < P; v++)
        {
            __m512 value = C == 1 ? acc[r][v][0] : _mm512_add_ps(acc[r][v][0], acc[r][v][1]);
            sum[r][v] = _mm512_fmadd_ps(value, scales_512(&j->w, ((p + v) * groups + g) * PANEL), sum[r][v]);
        }
        ADD_OFFSETS_512()
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < P; v++)
        finish_512(j, p + v, m + r, sum[r][v]);
}
#endif

/* Panels from start to stop, all rows: tiles of two panels and `most` rows as long as there are so many. For
 * one row and at most `alone` inputs, each panel by itself: then all codes are read in the order in which
 * they lie, which AMD's CPUs fetch from memory ahead of time faster than many short pieces of two panels.
 * Longer panels are long enough for that, and two of them read x half as often. */
#define DEFINE_PART(name, target, tile, bits, most, alone)                     \
    target static void name(const struct job *j, int64_t start, int64_t stop)  \
    {                                                                          \
        int64_t p = start, m;                                                  \
        if (j->rows == 1 && j->w.padded <= alone) {                            \
            for (; p < stop; p++)                                              \
                tile(j, p, 0, 1, 1, bits);                                     \
            return;                                                            \
        }                                                                      \
        for (; p + 2 <= stop; p += 2) {                                        \
            for (m = 0; m + most <= j->rows; m += most)                        \
                tile(j, p, m, 2, most, bits);                                  \
            for (; m + 4 <= j->rows; m += 4)                                   \
                tile(j, p, m, 2, 4, bits);                                     \
            for (; m + 2 <= j->rows; m += 2)                                   \
                tile(j, p, m, 2, 2, bits);                                     \
            for (; m < j->rows; m++)                                           \
                tile(j, p, m, 2, 1, bits);                                     \
        }                                                                      \
        for (; p < stop; p++) {                                                \
            for (m = 0; m + 4 <= j->rows; m += 4)                              \
                tile(j, p, m, 1, 4, bits);                                     \
            for (; m < j->rows; m++)                                           \
                tile(j, p, m, 1, 1, bits);                                     \
        }                                                                      \
    }

DEFINE_PART(int8_4_512, FOR_VNNI, int8_512, 4, 4, 4096)
DEFINE_PART(int8_8_512, FOR_VNNI, int8_512, 8, 4, 4096)
DEFINE_PART(int8_4_intel, FOR_VNNI, int8_ahead_512, 4, 4, 0)
DEFINE_PART(int8_8_intel, FOR_VNNI, int8_ahead_512, 8, 4, 0)
#if HAS_BF16
DEFINE_PART(bf16_4_512, FOR_BF16, bf16_512, 4, 6, 0)
#else
#define bf16_4_512 NULL
#endif
DEFINE_PART(digits_4_512, FOR_VNNI, digits_512, 4, 4, 0)
DEFINE_PART(digits_8_512, FOR_VNNI, digits_512, 8, 4, 0)
DEFINE_PART(digits_8_intel, FOR_VNNI, digits_ahead_512, 8, 4, 0)
DEFINE_PART(fp32_4_512, FOR_AVX512, fp32_512, 4, 4, 0)
DEFINE_PART(fp32_8_512, FOR_AVX512, fp32_512, 8, 4, 4096)

/* ---- AMX: tiles of 16 rows ---- */

#if HAS_AMX

#include "low_bit_amx.h"
#else
#define AMX_ROWS_AT_ONCE 0
#define CHUNK 0
#define int8_4_amx NULL
#define int8_8_amx NULL
#define digits_4_amx NULL
#define digits_8_amx NULL
#define bf16_4_amx NULL
#endif

/* ---- AVX2: one panel times R rows, in two halves of 8 outputs ---- */

/* 8 scales from element `at` on. */
INLINE FOR_AVX2 __m256 scales_256(const struct weight *w, int64_t at)
{
    const uint16_t *half = (const uint16_t *)w->scale + at;
    if (w->scale_dtype == DTYPE_F16)
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)half));
    if (w->scale_dtype == DTYPE_BF16)
        return _mm256_castsi256_ps(
            _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)half)), 16));
    return _mm256_loadu_ps((const float *)w->scale + at);
}

INLINE FOR_AVX2 void finish_256(const struct job *j, int64_t first, int64_t m, __m256 sum)
{
    int64_t left = j->w.outputs - first;
    float lanes[8];
    _mm256_storeu_ps(lanes, sum);
    for (int i = 0; i < 8 && i < left; i++)
        j->y[m * j->w.outputs + first + i] = lanes[i] + (j->bias ? j->bias[first + i] : 0);
}

#define ADD_OFFSETS_256()                                                                              \
    if (j->w.offset)                                                                                   \
        UNROLL for (int v = 0; v < V; v++) UNROLL for (int r = 0; r < R; r++)                          \
            sum[r][v] =                                                                                \
                _mm256_fmadd_ps(_mm256_loadu_ps(j->w.offset + (p * groups + g) * PANEL + (h + v) * 8), \
                    _mm256_set1_ps(j->group_sums[g * j->held + m + r]), sum[r][v]);

/* sum + unsigned bytes of a times signed bytes of b, four products into each number of 32 bits. */
INLINE FOR_AVX2 __m256i dot_vnni(__m256i sum, __m256i a, __m256i b)
{
#if HAS_AVX_VNNI
    VPDPBUSD_256(sum, a, b);
#endif
    return sum;
}

/* Halves h to h + V of panel p. Without VNNI: 4-bit codes times int8 fit into 16 bits eight times,
 * 8 * 2 * 15 * 127 < 2^15; 8-bit codes are taken as magnitude times signed x, and 2 * 128 * 127 < 2^15. */
INLINE FOR_AVX2 void int8_256(const struct job *j, int64_t p, int64_t h, int64_t m, const int V, const int R,
    const int bits, const int vnni)
{
    const int64_t groups = j->w.padded / j->w.group, each = j->blocks / groups;
    const __m256i half = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1),
        middle = _mm256_set1_epi8((char)j->w.middle);
    const uint8_t *codes = j->w.codes + p * j->w.padded * 2 * bits + h * 32;
    __m256 sum[4][2];
    UNROLL for (int v = 0; v < V; v++) UNROLL for (int r = 0; r < R; r++) sum[r][v] = _mm256_setzero_ps();
    for (int64_t g = 0, b = 0; g < groups; g++) {
        __m256 scale[2];
        UNROLL for (int v = 0; v < V; v++)
            scale[v] = scales_256(&j->w, (p * groups + g) * PANEL + (h + v) * 8);
        for (int64_t end = b + each; b < end; b++) {
            int64_t k = b * j->block, stop = k + j->block < j->w.padded ? k + j->block : j->w.padded;
            __m256i acc[4][2];
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
                acc[r][v] = vnni || bits == 4 ? _mm256_set1_epi32(j->block_start[(m + r) * j->blocks + b])
                                              : _mm256_setzero_si256();
            for (; k < stop; k += 32) {
                __m256i words[4][2];
                UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
                    words[r][v] = _mm256_setzero_si256();
                for (int64_t u = k; u < k + 32; u += 8)
                    UNROLL for (int v = 0; v < V; v++)
                    {
                        const uint8_t *at = codes + u * 2 * bits + v * 32;
                        /* the CPU alone asks too late for what one row reads once: 1.14 to 1.33 x on Zen 3 */
                        if (R == 1 && v == 0) {
                            _mm_prefetch((const char *)at + 4096, _MM_HINT_T0);
                            if (bits == 8)
                                _mm_prefetch((const char *)at + 4096 + 64, _MM_HINT_T0);
                        }
                        __m256i low = _mm256_loadu_si256((const __m256i *)at), high;
                        if (bits == 4) {
                            high = _mm256_and_si256(_mm256_srli_epi32(low, 4), half);
                            low = _mm256_and_si256(low, half);
                        } else {
                            high = _mm256_loadu_si256((const __m256i *)(at + 64));
                        }
                        if (bits == 8 && !vnni) {
                            low = _mm256_sub_epi8(low, middle);
                            high = _mm256_sub_epi8(high, middle);
                        }
                        UNROLL for (int r = 0; r < R; r++)
                        {
                            const int8_t *x = j->codes + (m + r) * j->row + u;
                            __m256i first = _mm256_set1_epi32(word(x)),
                                second = _mm256_set1_epi32(word(x + 4));
                            if (vnni) {
                                acc[r][v] = dot_vnni(dot_vnni(acc[r][v], low, first), high, second);
                            } else if (bits == 4) {
                                words[r][v] = _mm256_add_epi16(words[r][v], _mm256_maddubs_epi16(low, first));
                                words[r][v] =
                                    _mm256_add_epi16(words[r][v], _mm256_maddubs_epi16(high, second));
                            } else {
                                __m256i a =
                                    _mm256_maddubs_epi16(_mm256_abs_epi8(low), _mm256_sign_epi8(first, low));
                                __m256i c = _mm256_maddubs_epi16(_mm256_abs_epi8(high),
                                    _mm256_sign_epi8(second, high));
                                acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(a, ones));
                                acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(c, ones));
                            }
                        }
                    }
                if (bits == 4 && !vnni)
                    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
                        acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(words[r][v], ones));
            }
            UNROLL for (int r = 0; r < R; r++)
            {
                __m256 by = _mm256_set1_ps(j->block_scale[b * j->held + m + r]);
                UNROLL for (int v = 0; v < V; v++)
                    sum[r][v] = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(acc[r][v]), by), scale[v],
                        sum[r][v]);
            }
        }
        ADD_OFFSETS_256()
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
        finish_256(j, p * PANEL + (h + v) * 8, m + r, sum[r][v]);
}

/* Values of code i of 8 words; `next` has codes 4 to 7 of 8 bits. */
INLINE FOR_AVX2 __m256 value_256(__m256i found, __m256i next, const int i, __m256 lower, __m256 upper,
    const int bits)
{
    const int byte = i % 4, shift = byte * 8 + i / 4 * 4;
    if (bits == 8)
        return _mm256_cvtepi32_ps(
            _mm256_srai_epi32(_mm256_slli_epi32(i < 4 ? found : next, 24 - 8 * byte), 24));
    /* the lowest 3 bits choose in both halves of the table, the fourth one the half */
    const __m256i index = _mm256_srli_epi32(found, shift);
    const __m256 top = _mm256_castsi256_ps(_mm256_slli_epi32(found, 28 - shift));
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(lower, index), _mm256_permutevar8x32_ps(upper, index),
        top);
}

INLINE FOR_AVX2 void fp32_256(const struct job *j, int64_t p, int64_t h, int64_t m, const int V, const int R,
    const int bits, const int vnni)
{
    const int64_t groups = j->w.padded / j->w.group;
    const __m256 lower = bits == 4 ? _mm256_loadu_ps(j->w.table) : _mm256_setzero_ps();
    const __m256 upper = bits == 4 ? _mm256_loadu_ps(j->w.table + 8) : _mm256_setzero_ps();
    const __m256i middle = _mm256_set1_epi8((char)j->w.middle);
    const uint8_t *codes = j->w.codes + p * j->w.padded * 2 * bits + h * 32;
    __m256 sum[4][2];
    (void)vnni;
    UNROLL for (int v = 0; v < V; v++) UNROLL for (int r = 0; r < R; r++) sum[r][v] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++) {
        __m256 of_group[4][2];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
            of_group[r][v] = _mm256_setzero_ps();
        for (int64_t k = g * j->w.group; k < (g + 1) * j->w.group; k += 8)
            UNROLL for (int v = 0; v < V; v++)
            {
                const uint8_t *at = codes + k * 2 * bits + v * 32;
                __m256i found = _mm256_loadu_si256((const __m256i *)at), next = found;
                if (bits == 8) {
                    found = _mm256_sub_epi8(found, middle);
                    next = _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)(at + 64)), middle);
                }
                UNROLL for (int i = 0; i < 8; i++)
                {
                    const __m256 value = value_256(found, next, i, lower, upper, bits);
                    UNROLL for (int r = 0; r < R; r++)
                        of_group[r][v] = _mm256_fmadd_ps(value,
                            _mm256_set1_ps(j->x[(m + r) * j->stride + k + i]), of_group[r][v]);
                }
            }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
            sum[r][v] = _mm256_fmadd_ps(of_group[r][v],
                scales_256(&j->w, (p * groups + g) * PANEL + (h + v) * 8), sum[r][v]);
        ADD_OFFSETS_256()
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < V; v++)
        finish_256(j, p * PANEL + (h + v) * 8, m + r, sum[r][v]);
}

#define DEFINE_PART_256(name, tile, bits, vnni)                                       \
    FOR_AVX2 static void name(const struct job *j, int64_t start, int64_t stop)       \
    {                                                                                 \
        for (int64_t p = start; p < stop; p++) {                                      \
            int64_t m = 0;                                                            \
            for (; m + 4 <= j->rows; m += 4)                                          \
                for (int64_t h = 0; h < 2; h++)                                       \
                    tile(j, p, h, m, 1, 4, bits, vnni);                               \
            for (; m < j->rows; m++)                                                  \
                tile(j, p, 0, m, 2, 1, bits, vnni);                                   \
        }                                                                             \
    }

DEFINE_PART_256(int8_4_256, int8_256, 4, 0)
DEFINE_PART_256(int8_8_256, int8_256, 8, 0)
DEFINE_PART_256(int8_4_vnni, int8_256, 4, 1)
DEFINE_PART_256(int8_8_vnni, int8_256, 8, 1)
DEFINE_PART_256(fp32_4_256, fp32_256, 4, 0)
DEFINE_PART_256(fp32_8_256, fp32_256, 8, 0)

#define VALUES 256 /* inputs whose values stay in the L1 cache */
#define TILE_ROWS 6     /* rows whose sums fit the registers */
#define ROWS_OF_VALUES (22 * TILE_ROWS)
#define CHUNKS(j, k, count) \
    for (int64_t k = 0, count; k < (j)->w.padded && (count = chunk_of((j), k)); k += count)

/* Inputs of a group from k on, VALUES at most. */
static inline int64_t chunk_of(const struct job *j, int64_t k)
{
    const int64_t left = j->w.group - k % j->w.group;
    return left < VALUES ? left : VALUES;
}

/* Where input k, the first of a chunk of `count`, of a tile of rows lies that begins with row m. */
static inline float *tile_at(const struct job *j, int64_t k, int64_t count, int64_t m)
{
    return (float *)j->codes + k * j->rows + m * count;
}

/* Rows of x in the order in which they are multiplied: [chunks, tiles, inputs of a chunk, rows of a tile]. As
 * they are, rows that lie a multiple of 4 KB apart would meet in the same lines of the L1 cache. */
static void tile_rows(const struct job *j, int64_t start, int64_t stop)
{
    CHUNKS(j, k, count)
        for (int64_t m = start; m < stop; m += TILE_ROWS) {
            const int64_t rows = j->rows - m < TILE_ROWS ? j->rows - m : TILE_ROWS;
            float *to = tile_at(j, k, count, m);
            for (int64_t i = 0; i < count; i++)
                for (int64_t r = 0; r < rows; r++)
                    *to++ = j->x[(m + r) * j->stride + k + i];
        }
}

/* Values of inputs k to k + count of panel p. */
INLINE FOR_AVX2 void values_of_256(const struct job *j, int64_t p, int64_t k, int64_t count, const int bits,
    float (*values)[PANEL])
{
    const __m256 lower = bits == 4 ? _mm256_loadu_ps(j->w.table) : _mm256_setzero_ps();
    const __m256 upper = bits == 4 ? _mm256_loadu_ps(j->w.table + 8) : _mm256_setzero_ps();
    const __m256i middle = _mm256_set1_epi8((char)j->w.middle);
    const uint8_t *codes = j->w.codes + p * j->w.padded * 2 * bits + k * 2 * bits;
    for (int64_t u = 0; u < count; u += 8)
        UNROLL for (int v = 0; v < 2; v++)
        {
            const uint8_t *at = codes + u * 2 * bits + v * 32;
            __m256i found = _mm256_loadu_si256((const __m256i *)at), next = found;
            if (bits == 8) {
                found = _mm256_sub_epi8(found, middle);
                next = _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)(at + 64)), middle);
            }
            UNROLL for (int i = 0; i < 8; i++)
                _mm256_storeu_ps(values[u + i] + 8 * v, value_256(found, next, i, lower, upper, bits));
        }
}

/* of_group += x times values, for a tile of R rows. */
INLINE FOR_AVX2 void add_values_256(const float *x, int64_t count, float (*values)[PANEL],
    float (*of_group)[PANEL], const int R)
{
    __m256 acc[TILE_ROWS][2];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
        acc[r][v] = _mm256_loadu_ps(of_group[r] + 8 * v);
    for (int64_t k = 0; k < count; k++, x += R) {
        const __m256 low = _mm256_loadu_ps(values[k]), high = _mm256_loadu_ps(values[k] + 8);
        UNROLL for (int r = 0; r < R; r++)
        {
            const __m256 one = _mm256_set1_ps(x[r]);
            acc[r][0] = _mm256_fmadd_ps(low, one, acc[r][0]);
            acc[r][1] = _mm256_fmadd_ps(high, one, acc[r][1]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
        _mm256_storeu_ps(of_group[r] + 8 * v, acc[r][v]);
}

#define ADD_VALUES(R) \
    case R: add_values_256(tile_at(j, k, count, m), count, values, of_group + m, R); break

/* As fp32_256, bit for bit, for all rows: codes become values once for all of them. */
INLINE FOR_AVX2 void fp32_rows_256(const struct job *j, int64_t p, const int bits)
{
    const int64_t groups = j->w.padded / j->w.group, rows = j->rows;
    float values[VALUES][PANEL], of_group[ROWS_OF_VALUES][PANEL], sum[ROWS_OF_VALUES][PANEL];
    memset(sum, 0, (size_t)rows * sizeof *sum);
    memset(of_group, 0, (size_t)rows * sizeof *of_group);
    CHUNKS(j, k, count) {
        const int64_t g = k / j->w.group;
        int64_t m = 0;
        values_of_256(j, p, k, count, bits, values);
        for (; m + TILE_ROWS <= rows; m += TILE_ROWS)
            add_values_256(tile_at(j, k, count, m), count, values, of_group + m, TILE_ROWS);
        switch (rows - m) {
            ADD_VALUES(5);
            ADD_VALUES(4);
            ADD_VALUES(3);
            ADD_VALUES(2);
            ADD_VALUES(1);
        }
        if ((k + count) % j->w.group)
            continue;
        for (int64_t v = 0; v < 2; v++) {
            const int64_t at = (p * groups + g) * PANEL + v * 8;
            const __m256 scale = scales_256(&j->w, at),
                offset = j->w.offset ? _mm256_loadu_ps(j->w.offset + at) : _mm256_setzero_ps();
            for (int64_t r = 0; r < rows; r++) {
                __m256 total = _mm256_fmadd_ps(_mm256_loadu_ps(of_group[r] + 8 * v), scale,
                    _mm256_loadu_ps(sum[r] + 8 * v));
                if (j->w.offset)
                    total = _mm256_fmadd_ps(offset, _mm256_set1_ps(j->group_sums[g * j->held + r]), total);
                _mm256_storeu_ps(sum[r] + 8 * v, total);
            }
        }
        memset(of_group, 0, (size_t)rows * sizeof *of_group);
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t v = 0; v < 2; v++)
            finish_256(j, p * PANEL + v * 8, r, _mm256_loadu_ps(sum[r] + 8 * v));
}

#define DEFINE_FP32_256(name, bits)                                              \
    FOR_AVX2 static void name(const struct job *j, int64_t start, int64_t stop)  \
    {                                                                            \
        for (int64_t p = start; p < stop; p++)                                   \
            fp32_rows_256(j, p, bits);                                           \
    }

DEFINE_FP32_256(tiles_fp32_4_256, 4)
DEFINE_FP32_256(tiles_fp32_8_256, 8)

#define CODES 4096        /* inputs whose codes stay in the first caches: the longest block */
#define CODE_ROWS 4       /* rows whose sums fit the registers */
/* Rows from which on codes become bytes first: without VNNI, and with it. */
#define SOME_ROWS 3
#define SOME_ROWS_VNNI 16
#define ROWS_OF_CODES 120 /* rows for which they are made once */

/* GCC would compute the products of all rows first, and has no registers for them. */
#define KEEP(a, b) __asm__ volatile("" : "+x"(a), "+x"(b))

/* Codes of inputs k to k + count of panel p as bytes, [count / 4][16 outputs][4]: as they are, or in `bytes`. */
INLINE FOR_AVX2 const uint8_t *codes_of_256(const struct job *j, int64_t p, int64_t k, int64_t count,
    const int bits, uint8_t *bytes)
{
    const __m256i half = _mm256_set1_epi8(15);
    const uint8_t *codes = j->w.codes + (p * j->w.padded + k) * 2 * bits;
    if (bits == 8)
        return codes;
    for (int64_t u = 0; u < count; u += 8)
        UNROLL for (int v = 0; v < 2; v++)
        {
            const __m256i both = _mm256_loadu_si256((const __m256i *)(codes + u * 8 + v * 32));
            uint8_t *to = bytes + u * 16 + v * 32;
            _mm256_storeu_si256((__m256i *)to, _mm256_and_si256(both, half));
            _mm256_storeu_si256((__m256i *)(to + 64), _mm256_and_si256(_mm256_srli_epi32(both, 4), half));
        }
    return bytes;
}

/* sums += x times `codes`, those of inputs k to k + count of panel p, for R rows from m on: whole blocks, `one`:
 * of 32 inputs. As in int8_256, eight products of 4-bit codes fit into 16 bits. */
INLINE FOR_AVX2 void add_codes_256(const struct job *j, int64_t p, int64_t m, int64_t k, int64_t count,
    const uint8_t *codes, float (*sums)[PANEL], const int R, const int vnni, const int one)
{
    const int64_t groups = j->w.padded / j->w.group, each = j->blocks / groups, end = k + count;
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t b = k / j->block; b * j->block < end; b++) {
        const int64_t g = b / each, at = (p * groups + g) * PANEL, start = b * j->block,
            stop = one ? start + 32 : start + j->block < end ? start + j->block : end;
        const int adds = j->w.offset && (b + 1) % each == 0;
        __m256i acc[CODE_ROWS][2];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
            acc[r][v] = _mm256_setzero_si256();
        for (int64_t u = start; u < stop; u += 32) {
            __m256i words[CODE_ROWS][2];
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
                words[r][v] = vnni ? acc[r][v] : _mm256_setzero_si256();
            for (int64_t i = u; i < u + 32; i += 4) {
                const __m256i *from = (const __m256i *)(codes + (i - k) * 16);
                const __m256i low = _mm256_loadu_si256(from), high = _mm256_loadu_si256(from + 1);
                UNROLL for (int r = 0; r < R; r++)
                {
                    const __m256i x = _mm256_set1_epi32(word(j->codes + (m + r) * j->row + i));
                    if (vnni) {
                        words[r][0] = dot_vnni(words[r][0], low, x);
                        words[r][1] = dot_vnni(words[r][1], high, x);
                    } else {
                        words[r][0] = _mm256_add_epi16(words[r][0], _mm256_maddubs_epi16(low, x));
                        words[r][1] = _mm256_add_epi16(words[r][1], _mm256_maddubs_epi16(high, x));
                    }
                    KEEP(words[r][0], words[r][1]);
                }
            }
            UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < 2; v++)
                if (vnni || one)
                    acc[r][v] = words[r][v];
                else
                    acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(words[r][v], ones));
        }
        UNROLL for (int r = 0; r < R; r++)
        {
            const __m256i first = _mm256_set1_epi32(j->block_start[(m + r) * j->blocks + b]);
            const __m256 by = _mm256_set1_ps(j->block_scale[b * j->held + m + r]);
            UNROLL for (int v = 0; v < 2; v++)
            {
                const __m256i total = one && !vnni ? _mm256_madd_epi16(acc[r][v], ones) : acc[r][v];
                const __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(total, first)), by);
                __m256 sum = _mm256_fmadd_ps(value, scales_256(&j->w, at + 8 * v),
                    _mm256_loadu_ps(sums[r] + 8 * v));
                if (adds)
                    sum = _mm256_fmadd_ps(_mm256_loadu_ps(j->w.offset + at + 8 * v),
                        _mm256_set1_ps(j->group_sums[g * j->held + m + r]), sum);
                _mm256_storeu_ps(sums[r] + 8 * v, sum);
            }
        }
    }
}

#define ADD_CODES(R) \
    case R: add_codes_256(j, p, first + m, k, count, codes, sums + m, R, vnni, 0); break

/* As int8_256, bit for bit, for all rows: codes become bytes once for many of them. */
INLINE FOR_AVX2 void int8_rows_256(const struct job *j, int64_t p, int64_t first, const int bits,
    const int vnni)
{
    const int64_t left = j->rows - first, rows = left < ROWS_OF_CODES ? left : ROWS_OF_CODES,
        most = CODES / j->block * j->block;
    float sums[ROWS_OF_CODES][PANEL];
    uint8_t bytes[16 * CODES];
    memset(sums, 0, (size_t)rows * sizeof *sums);
    for (int64_t k = 0, count; k < j->w.padded; k += count) {
        count = j->w.padded - k < most ? j->w.padded - k : most;
        const uint8_t *codes = codes_of_256(j, p, k, count, bits, bytes);
        int64_t m = 0;
        for (; m + CODE_ROWS <= rows; m += CODE_ROWS)
            if (j->block == 32)
                add_codes_256(j, p, first + m, k, count, codes, sums + m, CODE_ROWS, vnni, 1);
            else
                add_codes_256(j, p, first + m, k, count, codes, sums + m, CODE_ROWS, vnni, 0);
        switch (rows - m) {
            ADD_CODES(3);
            ADD_CODES(2);
            ADD_CODES(1);
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t v = 0; v < 2; v++)
            finish_256(j, p * PANEL + v * 8, first + r, _mm256_loadu_ps(sums[r] + 8 * v));
}

#define DEFINE_ROWS_256(name, bits, vnni)                                        \
    FOR_AVX2 static void name(const struct job *j, int64_t start, int64_t stop)  \
    {                                                                            \
        for (int64_t p = start; p < stop; p++)                                   \
            for (int64_t m = 0; m < j->rows; m += ROWS_OF_CODES)                 \
                int8_rows_256(j, p, m, bits, vnni);                              \
    }

DEFINE_ROWS_256(rows_4_256, 4, 0)
DEFINE_ROWS_256(rows_4_vnni, 4, 1)
DEFINE_ROWS_256(rows_8_vnni, 8, 1)

/* ---- the call ---- */

/* What a caller must see to. */
static int check(const struct nc_low_bit *how, const struct nc_low_bit_weight *w)
{
    const int64_t block = how->block, longest = HAS_AMX ? CHUNK : 4096;
    EXPECT(w->size == (int64_t)sizeof *w, OTHER_NUMBERS);
    EXPECT(w->scale_dtype == DTYPE_F32 || w->scale_dtype == DTYPE_F16 || w->scale_dtype == DTYPE_BF16,
        OTHER_DTYPE);
    EXPECT(w->isa >= ISA_AVX2 && w->isa <= ISA_AMX && nc_may_use() >> w->isa & 1, NOT_HERE);
    EXPECT((w->bits == 4 || w->bits == 8) && w->outputs > 0 && w->inputs > 0, OTHER_SIZE);
    EXPECT(w->padded >= w->inputs && w->padded % LOW_BIT_STEP == 0, OTHER_SIZE);
    EXPECT(w->group > 0 && w->group % LOW_BIT_STEP == 0 && w->padded % w->group == 0, OTHER_SIZE);
    EXPECT(how->rows >= 0 && how->stride >= (block == BLOCK_ROW || block > 0 ? w->inputs : w->padded),
        OTHER_SIZE);
    EXPECT(block >= BLOCK_BF16 && block % 32 <= 0 && block <= longest
        && (block <= 0 || w->group % block == 0), OTHER_SIZE);
    return OK;
}

/* How x is multiplied: rounded to int8 by blocks or by rows, as it is, or in bf16 with 4-bit codes. */
enum { BY_BLOCKS = 1, BY_ROWS = 2, IN_INT8 = BY_BLOCKS | BY_ROWS, EXACTLY = 4, IN_BF16 = 8 };
/* Instruction sets that a kernel is for. */
enum {
    OF_AMX = 1 << ISA_AMX,
    OF_BF16 = 1 << ISA_AVX512_BF16,
    OF_VNNI = 1 << ISA_AVX512_VNNI | OF_BF16 | OF_AMX
};
enum {
    OF_AVX_VNNI = 1 << ISA_AVX_VNNI,
    OF_AVX512 = 1 << ISA_AVX512 | OF_VNNI,
    OF_ANY = 1 << ISA_AVX2 | OF_AVX_VNNI | OF_AVX512
};

/* A kernel, and what it is for. */
struct kernel {
    int isas, modes, bits;
    int64_t least;        /* rows */
    int intel;            /* for CPUs of Intel alone */
    int digits, tiles;    /* of x, 0: it stays in floating point; whether it lies in tiles */
    part_t part, prepare; /* prepare: of x, or null */
    part_t many;          /* from FEW_ROWS on, or null */
};

/* The first one that fits is taken. Tiles pay from some rows on; for fewer rows than those of bf16, digits
 * take less time. */
static const struct kernel kernels[] = {
    {OF_AMX, BY_BLOCKS, 4, .least = 13, .digits = 1, .tiles = 1, .part = int8_4_amx, .prepare = round_rows},
    {OF_AMX, BY_BLOCKS, 8, .least = 13, .digits = 1, .tiles = 1, .part = int8_8_amx, .prepare = round_rows},
    {OF_AMX, BY_ROWS, 4, .least = 9, .digits = 1, .tiles = 1, .part = int8_4_amx, .prepare = round_rows},
    {OF_AMX, BY_ROWS, 8, .least = 9, .digits = 1, .tiles = 1, .part = int8_8_amx, .prepare = round_rows},
    {OF_VNNI, IN_INT8, 4, .intel = 1, .digits = 1, .part = int8_4_intel, .prepare = round_rows},
    {OF_VNNI, IN_INT8, 8, .intel = 1, .digits = 1, .part = int8_8_intel, .prepare = round_rows},
    {OF_VNNI, IN_INT8, 4, .digits = 1, .part = int8_4_512, .prepare = round_rows},
    {OF_VNNI, IN_INT8, 8, .digits = 1, .part = int8_8_512, .prepare = round_rows},
    {OF_AVX_VNNI, IN_INT8, 4, .least = SOME_ROWS_VNNI, .digits = 1, .part = rows_4_vnni,
        .prepare = round_rows},
    {OF_AVX_VNNI, IN_INT8, 8, .least = SOME_ROWS_VNNI, .digits = 1, .part = rows_8_vnni,
        .prepare = round_rows},
    {OF_AVX_VNNI, IN_INT8, 4, .digits = 1, .part = int8_4_vnni, .prepare = round_rows},
    {OF_AVX_VNNI, IN_INT8, 8, .digits = 1, .part = int8_8_vnni, .prepare = round_rows},
    {OF_ANY, IN_INT8, 4, .least = SOME_ROWS, .digits = 1, .part = rows_4_256, .prepare = round_rows},
    {OF_ANY, IN_INT8, 4, .digits = 1, .part = int8_4_256, .prepare = round_rows},
    {OF_ANY, IN_INT8, 8, .digits = 1, .part = int8_8_256, .prepare = round_rows},
    {OF_AMX, IN_BF16, 4, .least = 5, .tiles = 1, .part = bf16_4_amx, .prepare = order_rows},
    {OF_BF16, IN_BF16, 4, .least = 4, .part = bf16_4_512, .prepare = order_rows},
    {OF_AMX, EXACTLY, 4, .least = 7, .digits = DIGITS, .tiles = 1, .part = digits_4_amx,
        .prepare = split_rows},
    {OF_AMX, EXACTLY, 8, .least = 7, .digits = DIGITS, .tiles = 1, .part = digits_8_amx,
        .prepare = split_rows},
    {OF_VNNI, EXACTLY | IN_BF16, 4, .digits = DIGITS, .part = digits_4_512, .prepare = split_rows},
    {OF_VNNI, EXACTLY, 8, .intel = 1, .digits = DIGITS, .part = digits_8_intel, .prepare = split_rows},
    {OF_VNNI, EXACTLY, 8, .digits = DIGITS, .part = digits_8_512, .prepare = split_rows},
    {OF_AVX512, EXACTLY | IN_BF16, 4, .part = fp32_4_512},
    {OF_AVX512, EXACTLY, 8, .part = fp32_8_512},
    {OF_ANY, EXACTLY | IN_BF16, 4, .part = fp32_4_256, .many = tiles_fp32_4_256},
    {OF_ANY, EXACTLY, 8, .part = fp32_8_256, .many = tiles_fp32_8_256},
};

static int mode_of(int64_t block, int64_t bits)
{
    if (block > 0)
        return BY_BLOCKS;
    if (block == BLOCK_ROW)
        return BY_ROWS;
    return HAS_BF16 && block == BLOCK_BF16 && bits == 4 ? IN_BF16 : EXACTLY;
}

/* Each instruction set has a kernel for each mode, bits and number of rows. */
static const struct kernel *kernel_for(int64_t isa, int mode, int64_t bits, int64_t rows)
{
    const struct kernel *k = kernels;
    const int intel = __builtin_cpu_is("intel");
    if (isa == ISA_AVX512 && !(CPU_SUPPORTS("avx512bw") && CPU_SUPPORTS("avx512vl")))
        isa = ISA_AVX2;
    while (!(k->isas >> isa & 1 && k->modes & mode && k->bits == bits && rows >= k->least
        && intel >= k->intel))
        k++;
    return k;
}

/* y = x W^T + bias.
 *
 * tensors: y; x, [rows, inputs], or where it is not rounded to int8 [rows, padded]; the weight, codes,
 *   scales, offsets, values of 4-bit codes; bias. Offsets and bias may have no address.
 */
int nc_low_bit(const struct nc_low_bit *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_low_bit);
    const struct nc_low_bit_weight *shape = (const struct nc_low_bit_weight *)tensors[2];
    const float *x = (const float *)tensors[1], *offset = (const float *)tensors[5];
    float *y = (float *)tensors[0];
    const int64_t rows = how->rows, stride = how->stride, threads = how->threads;
    _Atomic int unfit = 0;
    const int wrong = check(how, shape);
    EXPECT(!wrong, wrong);
    struct job j = {.w = {shape->outputs, shape->inputs, shape->padded, shape->group, shape->bits,
                        shape->middle, (const uint8_t *)tensors[3], tensors[4], offset,
                        (const float *)tensors[6], shape->scale_dtype},
        .stride = stride,
        .bias = (const float *)tensors[7],
        .unfit = &unfit};
    const struct kernel *kernel = kernel_for(shape->isa, mode_of(how->block, shape->bits), shape->bits, rows);
    const int64_t of_fp32 = shape->isa < ISA_AVX512 ? ISA_AVX2 : ISA_AVX512;
    const part_t exactly = kernel_for(of_fp32, EXACTLY, shape->bits, rows)->part;
    const part_t in_tiles = rows < FEW_ROWS ? NULL : kernel->many;
    const int digits = kernel->digits, amx = kernel->tiles, bf16 = kernel->modes == IN_BF16;
    const int64_t block = how->block == BLOCK_BF16 ? 0 : how->block;
    const int64_t panels = (j.w.outputs + PANEL - 1) / PANEL, groups = j.w.padded / j.w.group;
    /* each pair of panels reads x again: it should stay in the second cache */
    const int64_t x_at_once = second_cache() / (amx ? 2 : 4), each = amx ? 16 : 4,
        fit = x_at_once / (j.w.padded * (digits ? digits : bf16 ? 2 : 4)) / each * each;
    const int64_t some = amx && fit > AMX_ROWS_AT_ONCE ? AMX_ROWS_AT_ONCE : fit < 16 ? 16 : fit;
    const int64_t at_most = in_tiles ? ROWS_OF_VALUES : some, most = rows < at_most ? rows : at_most;
    char *scratch = NULL;
    j.held = (most + each - 1) / each * each; /* tiles have all of their rows */
    if (digits) {
        /* int32 holds the sums of 4096 products of 8 bits; fp32 holds those of 128 without rounding */
        int64_t longest = digits > 1 ? 128 : HAS_AMX && shape->isa == ISA_AMX ? CHUNK : 4096;
        j.per_token = block < 0;
        j.block = block > 0 ? block : j.w.group < longest ? j.w.group : longest;
        if (groups > 1)
            for (; j.w.group % j.block; j.block -= 32)
                ;
        j.blocks = (j.w.padded + j.block - 1) / j.block;
    }
    if (digits || bf16 || offset || in_tiles) {
        j.tiled = amx;
        j.plane = amx ? ((bf16 ? 2 : 1) * j.w.padded + 63) / 64 * 64 : (bf16 ? 2 : 1) * j.w.padded;
        j.row = in_tiles ? j.w.padded * (int64_t)sizeof(float) : (digits ? digits : 1) * j.plane;
        scratch = malloc(j.held * (4 * groups + 4 * j.blocks + digits * 4 * j.blocks + j.row) + 64);
        if (!scratch)
            return NO_MEMORY;
        j.group_sums = offset ? (float *)scratch : NULL;
        j.block_scale = (float *)scratch + j.held * groups;
        j.block_start = (int32_t *)(j.block_scale + j.held * j.blocks);
        j.codes = (int8_t *)(((uintptr_t)(j.block_start + j.held * j.blocks * digits) + 63) / 64 * 64);
    }
    for (int64_t done = 0; done < rows; done += most) {
        j.rows = rows - done < most ? rows - done : most;
        j.x = x + done * stride;
        j.y = y + done * j.w.outputs;
        int64_t worth = 1 + panels * PANEL * j.w.padded / WORK_PER_THREAD * j.rows,
            use = threads < worth ? threads : worth;
        int64_t few = j.rows < 8 ? 1 : use;
        unfit = 0;
        if (scratch) /* scales of rows that are not there, too: tiles multiply them */
            memset(scratch, 0, j.held * (groups + j.blocks) * sizeof(float));
        if (kernel->prepare)
            run(&j, kernel->prepare, j.rows, 1, few, threads);
        if (offset && (!digits || unfit))
            run(&j, sum_rows, j.rows, 1, few, threads);
        if (in_tiles && j.rows >= FEW_ROWS) {
            run(&j, tile_rows, j.rows, TILE_ROWS, use, threads);
            run(&j, in_tiles, panels, 1, use, threads);
            continue;
        }
        run(&j, unfit ? exactly : kernel->part, panels, 2, use, threads);
    }
    free(scratch);
    return OK;
}
#else
int nc_low_bit(const struct nc_low_bit *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_low_bit);
    (void)tensors;
    return NOT_HERE;
}
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
CODE_FOR(1 << ISA_AVX2 | 1 << ISA_AVX_VNNI | 1 << ISA_AVX512 | 1 << ISA_AVX512_VNNI | 1 << ISA_AVX512_BF16 | 1 << ISA_AMX)
#else
CODE_FOR(0)
#endif

int nc_low_bit_amx(void)
{
#if defined(__x86_64__) && HAS_AMX
    return may_use_tiles();
#else
    return 0;
#endif
}
