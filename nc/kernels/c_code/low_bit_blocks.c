/* Linears with weights of any low-bit format and any group: y = x W^T + bias, where W is decoded by blocks
 * that stay in the L1 cache.
 *
 *   W[n, k] = factor[n] * (scale[n, g] * value(code[n, k]) + offset[n, g])
 *
 * The layout of a weight, the same for all instruction sets, is made of panels of 16 outputs. Each group of K
 * is padded to a multiple of 8:
 *   TABLE    [panel][K / 8][16 outputs] words of 32 bits; byte i of a word has code k + i in its low half and
 *            code k + 4 + i in its high half; values are those of a table of 16
 *   others   [panel][K][16 outputs] bytes: INTEGER: a signed number; E4M3, E5M2: a sign, so many bits of
 *            exponent, and mantissa. E4M3 is read 2^-8 times as large as it is, which `factor` makes good
 *   scales   [panel][group][16 outputs], fp32, fp16 or bf16; offsets likewise, fp32
 *
 * Three forms:
 *   few      codes become fp32 in registers; sums of groups are multiplied by their scale
 *   many     blocks of 16 or 32 outputs become fp32 with their scales, and all rows multiply them
 *   tiles    the same with AMX: a weight is the sum of at most three numbers of bf16, and so is x. Products
 *            that are below 2^-24 of the largest ones are left out, and so the result is as exact as sums in
 *            fp32. Where x is bf16, weights are rounded to bf16
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

#define STEP BLOCKS_STEP        /* inputs that are decoded at once */
#define BLOCK 128               /* inputs of a decoded block */
#define ROWS_AT_ONCE 256        /* whose sums are on the stack: 32 KB */
#define TINY_AMAX 0x1p-100f     /* as in nc.numerics.affine */
#define MOST_PARTS 3            /* that a number is the sum of */
#define LEAST_FOR_TILES 0x1p-90f /* AMX takes parts below 2^-126 as 0 */
#define MOST_FOR_TILES 0x1p126f

enum { KINDS = CODING_E5M2 + 1 }; /* of codes */

struct weight {
    int64_t outputs, inputs, groups;
    int64_t group, held; /* inputs of a group, and as many as are stored of it */
    /* of codes; numbers of bf16 that a decoded weight is the sum of, 0: not known to be one */
    int64_t kind, parts;
    int64_t scale_dtype;
    const uint8_t *codes;
    const void *scale;
    const float *offset; /* may be null */
    const float *table, *factor;
};

struct job {
    struct weight w;
    const float *x; /* [rows, inputs as they are given] */
    int64_t rows, stride, block;
    float *y;          /* [rows, outputs] */
    const float *bias; /* may be null */
    float *spread;     /* x as it is multiplied: rounded, groups padded; null where that is x itself */
    float *sums;       /* [rows, groups] of x, for offsets */
    float *tiles;      /* for `many`: see tile_at */
    uint16_t *halves;  /* for `tiles`: [parts][rows / 16][K / 32][16][32] in bf16 */
    int64_t plane;     /* elements of a part there */
    int parts;         /* of x */
    _Atomic int *unfit; /* set where x can't be split into such parts, by any thread */
};

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define FOR_AVX2 FOR_CPU("avx2,fma,f16c")
#define FOR_AVX512 FOR_CPU("avx2,fma,f16c,avx512f,avx512bw,avx512vl")
#define UNROLL _Pragma("GCC unroll 32")

/* Inputs as they are stored. */
static inline int64_t padded(const struct weight *w) { return w->groups * w->held; }

/* Where the codes of panel p from input k on are; k is a multiple of STEP. */
static inline const uint8_t *codes_at(const struct weight *w, int64_t p, int64_t k)
{
    return w->codes + (p * padded(w) + k) * (w->kind == CODING_TABLE ? PANEL / 2 : PANEL);
}

/* ---- x ---- */

static inline const float *row_of(const struct job *j, int64_t m)
{
    return j->spread ? j->spread + m * padded(&j->w) : j->x + m * j->stride;
}

/* As choose_qparams of nc.numerics.affine: symmetric, 127 codes on each side; NaN where x has one or is
 * infinite. */
FOR_AVX2 static float int8_scale(const float *x, int64_t count)
{
    float amax = 0, unfit = 0, most[8] = {0}, bad[8] = {0};
    int64_t k = 0;
    for (; k + 8 <= count; k += 8)
        for (int i = 0; i < 8; i++) {
            most[i] = fabsf(x[k + i]) > most[i] ? fabsf(x[k + i]) : most[i];
            bad[i] += x[k + i] * 0;
        }
    for (int i = 0; i < 8; i++) {
        amax = most[i] > amax ? most[i] : amax;
        unfit += bad[i];
    }
    for (; k < count; k++) {
        amax = fabsf(x[k]) > amax ? fabsf(x[k]) : amax;
        unfit += x[k] * 0;
    }
    return unfit != 0 ? NAN : amax < TINY_AMAX ? 1.0f : (float)((double)amax / 127);
}

/* What the codes of `count` elements in int8 stand for. */
FOR_AVX2 static void round_block(const float *x, int64_t count, float *to)
{
    const float scale = int8_scale(x, count);
    for (int64_t k = 0; k < count; k++) {
        const float code = rintf(x[k] / scale);
        to[k] = (code > 127 ? 127 : code < -127 ? -127 : code) * scale;
    }
}

/* Rows as they are multiplied. */
static void spread_rows(const struct job *j, int64_t start, int64_t stop)
{
    const struct weight *w = &j->w;
    for (int64_t m = start; m < stop; m++) {
        const float *x = j->x + m * j->stride;
        float *to = j->spread + m * padded(w);
        if (j->block) {
            const int64_t each = j->block > 0 ? j->block : w->inputs;
            for (int64_t k = 0; k < w->inputs; k += each)
                round_block(x + k, w->inputs - k < each ? w->inputs - k : each, to + k);
            x = to;
        }
        for (int64_t g = w->groups - 1; g >= 0; g--) { /* the last one first: x may be in the same memory */
            memmove(to + g * w->held, x + g * w->group, (size_t)w->group * sizeof *to);
            memset(to + g * w->held + w->group, 0, (size_t)(w->held - w->group) * sizeof *to);
        }
    }
}

/* Sums of the groups of rows. */
FOR_AVX2 static void sum_rows(const struct job *j, int64_t start, int64_t stop)
{
    const struct weight *w = &j->w;
    for (int64_t m = start; m < stop; m++)
        for (int64_t g = 0; g < w->groups; g++) {
            const float *x = row_of(j, m) + g * w->held;
            __m256 sums = _mm256_setzero_ps();
            float sum = 0, lanes[8];
            for (int64_t k = 0; k < w->held; k += STEP)
                sums = _mm256_add_ps(sums, _mm256_loadu_ps(x + k));
            _mm256_storeu_ps(lanes, sums);
            for (int i = 0; i < 8; i++)
                sum += lanes[i];
            j->sums[m * w->groups + g] = sum;
        }
}

/* Rows of a tile that begins where so many rows are left; at most `most`. */
static inline int64_t rows_of_tile(int64_t left, int64_t most)
{
    return left >= most ? most : left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
}

/* Where a tile of `rows` rows from m on lies: [K][rows]. Rows as they are could lie a multiple of 4 KB apart,
 * and meet in the same lines of the L1 cache. */
static inline float *tile_at(const struct job *j, int64_t m) { return j->tiles + m * padded(&j->w); }

static void tile_rows(const struct job *j, int64_t start, int64_t stop, int64_t most)
{
    for (int64_t m = start, rows; m < stop; m += rows) {
        float *to = tile_at(j, m);
        rows = rows_of_tile(j->rows - m, most);
        for (int64_t k = 0; k < padded(&j->w); k++)
            for (int64_t r = 0; r < rows; r++)
                *to++ = row_of(j, m + r)[k];
    }
}

/* ---- AVX-512 and AVX2: the same code for a panel in one register, or in two ---- */

#define PANELS 2     /* that are multiplied at once */
#define VECTORS 1    /* of a panel */
#define TILE_ROWS 12 /* whose sums fit the registers */
#define TARGET FOR_AVX512
#define NAME(name) name##_512
#define VECTOR __m512
#define OP(name) _mm512_##name

/* Values of STEP inputs of a panel. */
INLINE FOR_AVX512 void decode_512(const uint8_t *at, const int kind, const float *table,
    __m512 values[STEP][1])
{
    if (kind == CODING_TABLE) {
        const __m512i words = _mm512_loadu_si512(at);
        const __m512 found = _mm512_loadu_ps(table);
        UNROLL for (int i = 0; i < STEP; i++)
            values[i][0] = _mm512_permutexvar_ps(_mm512_srli_epi32(words, i % 4 * 8 + i / 4 * 4), found);
    } else if (kind == CODING_INTEGER) {
        UNROLL for (int i = 0; i < STEP; i++)
            values[i][0] =
                _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at + i * PANEL))));
    } else {
        UNROLL for (int i = 0; i < STEP; i += 2)
        {
            /* a byte becomes fp16: with 5 bits of exponent by a shift; with 4, the sign must go one bit
             * further */
            __m512i words = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(at + i * PANEL)));
            words = kind == CODING_E5M2
                ? _mm512_slli_epi16(words, 8)
                : _mm512_and_si512(_mm512_slli_epi16(words, 7), _mm512_set1_epi16(~0x4000));
            values[i][0] = _mm512_cvtph_ps(_mm512_castsi512_si256(words));
            values[i + 1][0] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
        }
    }
}

INLINE FOR_AVX512 __m512 from_half_512(const uint16_t *at, const int bf16)
{
    const __m256i found = _mm256_loadu_si256((const __m256i *)at);
    return bf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(found), 16))
                : _mm512_cvtph_ps(found);
}

INLINE FOR_AVX512 void store_512(float *to, __m512 value, int64_t left)
{
    if (left > 0)
        _mm512_mask_storeu_ps(to, left >= 16 ? 0xffff : (__mmask16)((1u << left) - 1), value);
}

#include "low_bit_blocks.h"

#define PANELS 1
#define VECTORS 2
#define TILE_ROWS 6
#define TARGET FOR_AVX2
#define NAME(name) name##_256
#define VECTOR __m256
#define OP(name) _mm256_##name

INLINE FOR_AVX2 void decode_256(const uint8_t *at, const int kind, const float *table, __m256 values[STEP][2])
{
    UNROLL for (int v = 0; v < 2; v++)
    {
        const __m256 lower = _mm256_loadu_ps(table), upper = _mm256_loadu_ps(table + 8);
        const __m256i words = kind == CODING_TABLE ? _mm256_loadu_si256((const __m256i *)(at + 32 * v))
                                                   : _mm256_setzero_si256();
        UNROLL for (int i = 0; i < STEP; i++)
        {
            const int shift = i % 4 * 8 + i / 4 * 4;
            const __m128i bytes = kind == CODING_TABLE
                ? _mm_setzero_si128()
                : _mm_loadl_epi64((const __m128i *)(at + i * PANEL + 8 * v));
            /* the lowest 3 bits choose in both halves of the table, the fourth one the half */
            if (kind == CODING_TABLE) {
                const __m256i index = _mm256_srli_epi32(words, shift);
                const __m256 top = _mm256_castsi256_ps(_mm256_slli_epi32(words, 28 - shift));
                values[i][v] = _mm256_blendv_ps(_mm256_permutevar8x32_ps(lower, index),
                    _mm256_permutevar8x32_ps(upper, index), top);
            } else if (kind == CODING_INTEGER) {
                values[i][v] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
            } else {
                const __m128i half = _mm_cvtepi8_epi16(bytes);
                values[i][v] = _mm256_cvtph_ps(kind == CODING_E5M2
                        ? _mm_slli_epi16(half, 8)
                        : _mm_and_si128(_mm_slli_epi16(half, 7), _mm_set1_epi16(~0x4000)));
            }
        }
    }
}

INLINE FOR_AVX2 __m256 from_half_256(const uint16_t *at, const int bf16)
{
    const __m128i found = _mm_loadu_si128((const __m128i *)at);
    return bf16 ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(found), 16))
                : _mm256_cvtph_ps(found);
}

INLINE FOR_AVX2 void store_256(float *to, __m256 value, int64_t left)
{
    float lanes[8];
    _mm256_storeu_ps(lanes, value);
    for (int i = 0; i < 8 && i < left; i++)
        to[i] = lanes[i];
}

#include "low_bit_blocks.h"

/* ---- AMX ---- */

#if HAS_AMX
#include "low_bit_blocks_amx.h"
#endif

/* ---- the call ---- */

/* What a caller must see to. */
static int check(const struct nc_low_bit_blocks *how, const struct nc_low_bit_blocks_weight *w)
{
    EXPECT(w->size == (int64_t)sizeof *w, OTHER_NUMBERS);
    EXPECT(w->scale_dtype == DTYPE_F32 || w->scale_dtype == DTYPE_F16 || w->scale_dtype == DTYPE_BF16,
        OTHER_DTYPE);
    EXPECT(w->coding >= CODING_TABLE && w->coding < KINDS, OTHER_DTYPE);
    EXPECT(w->isa >= ISA_AVX2 && w->isa <= ISA_AMX && nc_may_use() >> w->isa & 1, NOT_HERE);
    EXPECT(w->outputs > 0 && w->inputs > 0 && w->groups > 0 && w->inputs % w->groups == 0, OTHER_SIZE);
    EXPECT(w->held == (w->inputs / w->groups + STEP - 1) / STEP * STEP && w->parts >= 0
        && w->parts <= MOST_PARTS, OTHER_SIZE);
    EXPECT(how->rows >= 0 && how->stride >= w->inputs && how->block >= BLOCK_BF16, OTHER_SIZE);
    return OK;
}

struct plan {
    part_t few, many, tile;
    int64_t together; /* panels that a thread takes */
};

static struct plan choose(const struct weight *w, int64_t isa)
{
    static const part_t few[2][KINDS] = {{few_0_256, few_1_256, few_2_256, few_3_256},
        {few_0_512, few_1_512, few_2_512, few_3_512}};
    static const part_t many[2][KINDS] = {{many_0_256, many_1_256, many_2_256, many_3_256},
        {many_0_512, many_1_512, many_2_512, many_3_512}};
    const int wide =
        isa >= ISA_AVX512 && CPU_SUPPORTS("avx512bw") && CPU_SUPPORTS("avx512vl");
    struct plan found = {few[wide][w->kind], many[wide][w->kind], wide ? tile_all_512 : tile_all_256,
        wide ? 2 : 1};
    return found;
}

/* y = x W^T + bias.
 *
 * tensors: y; x, [rows, inputs]; the weight, codes, scales, offsets; 16 values of codes in a table, then the
 *   factors of all outputs of the panels; bias. Offsets and bias may have no address.
 */
int nc_low_bit_blocks(const struct nc_low_bit_blocks *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_low_bit_blocks);
    const struct nc_low_bit_blocks_weight *shape = (const struct nc_low_bit_blocks_weight *)tensors[2];
    const float *x = (const float *)tensors[1], *offset = (const float *)tensors[5],
        *values = (const float *)tensors[6];
    float *y = (float *)tensors[0];
    const int64_t rows = how->rows, stride = how->stride, threads = how->threads,
        in_bf16 = how->block == BLOCK_BF16;
    _Atomic int unfit = 0;
    const int wrong = check(how, shape);
    EXPECT(!wrong, wrong);
    struct job j = {.w = {shape->outputs, shape->inputs, shape->groups, shape->inputs / shape->groups,
                        shape->held, shape->coding, shape->parts, shape->scale_dtype,
                        (const uint8_t *)tensors[3], tensors[4], offset, values, values + PANEL},
        .stride = stride,
        .block = in_bf16 ? 0 : how->block,
        .bias = (const float *)tensors[7],
        .unfit = &unfit,
        .parts = in_bf16 ? 1 : 3};
    const struct weight *w = &j.w;
    const struct plan plan = choose(w, shape->isa);
    const int64_t panels = (w->outputs + PANEL - 1) / PANEL, inputs = padded(w);
    /* AMX takes less time from so many rows on: with more parts, blocks take longer to decode
     * (benchmarks/lowbit_kernels.py --weights) */
    const int64_t from = j.parts == 1 || w->parts == 1 ? 5 : w->parts == 2 ? 24 : 32;
    const int amx = HAS_AMX && shape->isa == ISA_AMX && w->parts && rows >= from,
        spread = j.block || w->held != w->group;
    /* each pair of panels reads x again: it should stay in the second cache */
    const int64_t fit = second_cache() / 2 / (inputs * (int64_t)sizeof(float)) / 48 * 48,
        least = fit < 48 ? 48 : fit;
    const int64_t at_once = amx ? ROWS_AT_ONCE : least < ROWS_AT_ONCE ? least : ROWS_AT_ONCE / 12 * 12,
        most = rows < at_once ? rows : at_once;
    const int64_t tiled = amx || most > FEW_ROWS_OF_BLOCKS ? most * inputs : 0;
    char *scratch;
    j.plane = (most + 15) / 16 * 16 * ((inputs + 31) / 32 * 32);
    scratch = malloc((size_t)(4 * (spread * most * inputs + most * w->groups + tiled)
        + (amx ? 2 * j.parts * j.plane : 0) + 64));
    if (!scratch)
        return NO_MEMORY;
    j.halves = (uint16_t *)(((uintptr_t)scratch + 63) / 64 * 64);
    j.tiles = (float *)(j.halves + (amx ? j.parts * j.plane : 0));
    j.sums = j.tiles + tiled;
    j.spread = spread ? j.sums + most * w->groups : NULL;
    for (int64_t done = 0; done < rows; done += most) {
        j.rows = rows - done < most ? rows - done : most;
        j.x = x + done * stride;
        j.y = y + done * w->outputs;
        const int64_t worth = 1 + panels * PANEL * inputs / WORK_PER_THREAD * j.rows,
            use = threads < worth ? threads : worth;
        const int64_t several = j.rows < 8 ? 1 : use;
        unfit = 0;
        if (spread)
            run(&j, spread_rows, j.rows, 1, several, threads);
#if HAS_AMX
        if (amx) {
            run(&j, split_rows, j.rows, 16, several, threads);
            if (!unfit) {
                run(&j, tiles_of[w->kind], panels, 2, use, threads);
                continue;
            }
        }
#endif
        if (j.rows <= FEW_ROWS_OF_BLOCKS) {
            if (offset)
                run(&j, sum_rows, j.rows, 1, several, threads);
            run(&j, plan.few, panels, plan.together, use, threads);
        } else {
            run(&j, plan.tile, j.rows, 12, several, threads);
            run(&j, plan.many, panels, plan.together, use, threads);
        }
    }
    free(scratch);
    return OK;
}
#else
int nc_low_bit_blocks(const struct nc_low_bit_blocks *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_low_bit_blocks);
    (void)tensors;
    return NOT_HERE;
}
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
CODE_FOR(1 << ISA_AVX2 | 1 << ISA_AVX512 | 1 << ISA_AMX)
#else
CODE_FOR(0)
#endif
