/* Recurrent layers with int8 weights and inputs of 8 bits: all steps of one direction of one layer.
 *
 * Each row of each step has its own range: the input of a layer, the hidden state, and what a projection
 * reads. So a row of the result depends on the same row of the input alone. Codes, scales and zero points are
 * those of nc.numerics.affine; sums of their products with codes of weights are exact in int32, and what
 * follows is computed in fp32.
 *
 * A matrix lies in panels of 16 outputs: [panel][K / 4][16 outputs][4 inputs], padded with zeros. That of the
 * input may be fp32, [panel][K][16 outputs]: its sums are made in the order of inputs, whatever rows are
 * computed beside a row.
 */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "isa.h"
#include "openmp.h"

#define ROWS 4              /* that share a load of the weights */
#define TINY_AMAX 0x1p-100  /* as in nc.numerics.affine */

struct matrix {
    int64_t outputs, inputs; /* outputs 0: there is none */
    const int8_t *codes;
    const float *scale;  /* [outputs] */
    const int32_t *sums; /* [outputs], of codes */
    const float *bias;   /* [outputs] or null */
};

struct layer {
    const struct nc_recurrent *how;
    const float *x;
    float *y;
    float *h, *c;  /* [rows, state], [rows, hidden]; the first states, then the last ones */
    float *gates;  /* [steps * rows, gates * hidden] */
    struct matrix input, recurrent, projection;
};

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define FOR_AVX2 FOR_CPU("avx2,fma")
#define FOR_VNNI FOR_CPU("avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")
#define UNROLL _Pragma("GCC unroll 16")

/* ---- codes of a row ---- */

struct range {
    float scale;
    int32_t zero_point; /* of codes from 0 to 255 */
    int finite;
};

FOR_AVX2 static struct range range_of(const float *x, int64_t count)
{
    __m256 least = _mm256_setzero_ps(), most = _mm256_setzero_ps(), differ = _mm256_setzero_ps();
    float low = 0.0f, high = 0.0f, lows[8], highs[8];
    int64_t i = 0;
    int unordered = 0;
    for (; i + 8 <= count; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        least = _mm256_min_ps(v, least); /* the second one where the first is NaN */
        most = _mm256_max_ps(v, most);
        differ = _mm256_or_ps(differ, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    }
    for (; i < count; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        unordered |= x[i] != x[i];
    }
    _mm256_storeu_ps(lows, least);
    _mm256_storeu_ps(highs, most);
    for (int lane = 0; lane < 8; lane++) {
        low = lows[lane] < low ? lows[lane] : low;
        high = highs[lane] > high ? highs[lane] : high;
    }
    const double span = (double)high - low, amax = -low > high ? -low : high;
    const struct range none = {1.0f, 0, !unordered && !_mm256_movemask_ps(differ) && amax <= 3.402823466e38};
    if (!none.finite || amax < TINY_AMAX)
        return none;
    const double scale = span / 255.0, zero_point = -rint(low / scale);
    const struct range found = {(float)scale,
        (int32_t)(zero_point < 0   ? 0
                : zero_point > 255 ? 255
                                   : zero_point),
        1};
    return found;
}

FOR_AVX2 static void codes_of(const float *x, int64_t count, struct range range, uint8_t *codes)
{
    const float zero_point = (float)range.zero_point;
    for (int64_t i = 0; i < count; i++) {
        float code = rintf(x[i] / range.scale) + zero_point;
        code = code < 0.0f ? 0.0f : code;
        codes[i] = (uint8_t)(int32_t)(code > 255.0f ? 255.0f : code);
    }
}

/* ---- sums of products: sums[row][output], codes of each row `stride` bytes behind those of the row
 * before ---- */

INLINE FOR_VNNI void panels_vnni(const struct matrix *m, int64_t first, const uint8_t *codes, int64_t stride,
    int32_t *sums, int64_t width, int rows, int panels)
{
    const int64_t words = (m->inputs + WORD - 1) / WORD;
    __m512i sum[ROWS][4];
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int p = 0; p < panels; p++)
            sum[r][p] = _mm512_setzero_si512();
    for (int64_t k = 0; k < words; k++)
        UNROLL
        for (int p = 0; p < panels; p++) {
            const __m512i w = _mm512_loadu_si512(m->codes + ((first + p) * words + k) * 64);
            UNROLL
            for (int r = 0; r < rows; r++) {
                int32_t word;
                memcpy(&word, codes + r * stride + 4 * k, 4);
                sum[r][p] = _mm512_dpbusd_epi32(sum[r][p], _mm512_set1_epi32(word), w);
            }
        }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int p = 0; p < panels; p++)
            _mm512_storeu_si512(sums + r * width + (first + p) * PANEL, sum[r][p]);
}

/* Codes less 128 times weights, summed in pairs of 16 bits: |code - 128| is at most 128 and |weight| at most
 * 127, so that nothing saturates. */
INLINE FOR_AVX2 void panels_avx2(const struct matrix *m, int64_t first, const uint8_t *codes, int64_t stride,
    int32_t *sums, int64_t width, int rows)
{
    const int64_t words = (m->inputs + WORD - 1) / WORD;
    const __m256i ones = _mm256_set1_epi16(1);
    __m256i sum[ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++)
        sum[r][0] = sum[r][1] = _mm256_setzero_si256();
    for (int64_t k = 0; k < words; k++)
        UNROLL
        for (int half = 0; half < 2; half++) {
            const __m256i w =
                _mm256_loadu_si256((const __m256i *)(m->codes + (first * words + k) * 64 + 32 * half));
            UNROLL
            for (int r = 0; r < rows; r++) {
                int32_t word;
                memcpy(&word, codes + r * stride + 4 * k, 4);
                const __m256i x = _mm256_xor_si256(_mm256_set1_epi32(word), _mm256_set1_epi8(-128));
                const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(x), _mm256_sign_epi8(w, x));
                sum[r][half] = _mm256_add_epi32(sum[r][half], _mm256_madd_epi16(pairs, ones));
            }
        }
    UNROLL
    for (int r = 0; r < rows; r++)
        UNROLL
        for (int half = 0; half < 2; half++)
            _mm256_storeu_si256((__m256i *)(sums + r * width + first * PANEL + 8 * half), sum[r][half]);
}

#define FOR_EACH_COUNT(CALL) \
    switch (rows) {          \
    case 1: CALL(1); break;  \
    case 2: CALL(2); break;  \
    case 3: CALL(3); break;  \
    default: CALL(4);        \
    }

FOR_VNNI static void sums_vnni(const struct matrix *m, const uint8_t *codes, int64_t stride, int32_t *sums,
    int64_t width, int rows)
{
    const int64_t panels = width / PANEL;
    int64_t p = 0;
#define FOUR(R) panels_vnni(m, p, codes, stride, sums, width, R, 4)
    for (; p + 4 <= panels; p += 4)
        FOR_EACH_COUNT(FOUR)
#define ONE(R) panels_vnni(m, p, codes, stride, sums, width, R, 1)
    for (; p < panels; p++)
        FOR_EACH_COUNT(ONE)
}

FOR_AVX2 static void sums_avx2(const struct matrix *m, const uint8_t *codes, int64_t stride, int32_t *sums,
    int64_t width, int rows)
{
#define HALVES(R) panels_avx2(m, p, codes, stride, sums, width, R)
    for (int64_t p = 0; p < width / PANEL; p++)
        FOR_EACH_COUNT(HALVES)
}

/* What is computed of a row alone, so that it is the same whatever rows are computed beside it. */
FOR_AVX2 __attribute__((noinline)) static void values_of(const struct matrix *m, const int32_t *sums,
    struct range range, int32_t middle, float *y)
{
    const int32_t shift = range.zero_point - middle;
    for (int64_t n = 0; n < m->outputs; n++)
        y[n] = (float)(sums[n] - shift * m->sums[n]) * (range.scale * m->scale[n]);
    if (m->bias)
        for (int64_t n = 0; n < m->outputs; n++)
            y[n] += m->bias[n];
    if (!range.finite)
        for (int64_t n = 0; n < m->outputs; n++)
            y[n] = NAN;
}

struct scratch {
    uint8_t *codes; /* [ROWS][stride] */
    int32_t *sums;  /* [ROWS][outputs, padded] */
    float *values;  /* [ROWS][gates * hidden] */
    float *before;  /* [ROWS][hidden], in front of a projection */
    int64_t stride;
};

/* y = x W^T + bias for so many rows, at most ROWS. */
static void product(const struct layer *l, const struct matrix *m, const float *x, int64_t x_row, float *y,
    int64_t y_row, int rows, const struct scratch *s)
{
    const int64_t width = (m->outputs + PANEL - 1) / PANEL * PANEL;
    struct range ranges[ROWS];
    for (int r = 0; r < rows; r++) {
        ranges[r] = range_of(x + r * x_row, m->inputs);
        if (ranges[r].finite)
            codes_of(x + r * x_row, m->inputs, ranges[r], s->codes + r * s->stride);
    }
    if (l->how->isa == ISA_AVX512_VNNI)
        sums_vnni(m, s->codes, s->stride, s->sums, width, rows);
    else
        sums_avx2(m, s->codes, s->stride, s->sums, width, rows);
    for (int r = 0; r < rows; r++)
        values_of(m, s->sums + r * width, ranges[r], l->how->isa == ISA_AVX512_VNNI ? 0 : 128, y + r * y_row);
}

/* The same in fp32. */
INLINE FOR_AVX2 void float_panel(const struct matrix *m, int64_t panel, const float *x, int64_t x_row, float *y,
    int64_t y_row, int rows)
{
    const float *w = (const float *)m->codes + panel * m->inputs * PANEL;
    const int64_t left = m->outputs - panel * PANEL;
    __m256 sum[ROWS][2];
    UNROLL
    for (int r = 0; r < rows; r++)
        sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < m->inputs; k++)
        UNROLL
        for (int half = 0; half < 2; half++) {
            const __m256 right = _mm256_loadu_ps(w + k * PANEL + 8 * half);
            UNROLL
            for (int r = 0; r < rows; r++)
                sum[r][half] = _mm256_fmadd_ps(_mm256_set1_ps(x[r * x_row + k]), right, sum[r][half]);
        }
    for (int r = 0; r < rows; r++) {
        float values[PANEL];
        _mm256_storeu_ps(values, sum[r][0]);
        _mm256_storeu_ps(values + 8, sum[r][1]);
        for (int64_t n = 0; n < (left < PANEL ? left : PANEL); n++)
            y[r * y_row + panel * PANEL + n] = values[n] + (m->bias ? m->bias[panel * PANEL + n] : 0.0f);
    }
}

FOR_AVX2 static void float_product(const struct matrix *m, const float *x, int64_t x_row, float *y,
    int64_t y_row, int rows)
{
#define FLOATS(R) float_panel(m, p, x, x_row, y, y_row, R)
    for (int64_t p = 0; p < (m->outputs + PANEL - 1) / PANEL; p++)
        FOR_EACH_COUNT(FLOATS)
}

/* ---- gates: 8 elements at a time, of which the last ones may not be there ---- */

INLINE FOR_AVX2 __m256i there(int64_t count)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count < 8 ? (int)count : 8),
        _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

INLINE FOR_AVX2 __m256 constant(float value)
{
    return _mm256_set1_ps(value);
}

/* e^x - 1 = 2^n (e^r - 1) + 2^n - 1, with |r| <= ln(2) / 2 and the Taylor series of e^r - 1, whose next term
 * is below half a unit of fp32. */
INLINE FOR_AVX2 __m256 exponential_less_1(__m256 x, float limit)
{
    /* the second one where one is NaN */
    x = _mm256_min_ps(constant(limit), _mm256_max_ps(constant(-limit), x));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, constant(1.44269504f)),
        _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 r =
        _mm256_fmadd_ps(n, constant(2.12194440e-4f), _mm256_fnmadd_ps(n, constant(0.693359375f), x));
    __m256 p = constant(1.0f / 5040);
    p = _mm256_fmadd_ps(p, r, constant(1.0f / 720));
    p = _mm256_fmadd_ps(p, r, constant(1.0f / 120));
    p = _mm256_fmadd_ps(p, r, constant(1.0f / 24));
    p = _mm256_fmadd_ps(p, r, constant(1.0f / 6));
    p = _mm256_fmadd_ps(p, r, constant(0.5f));
    p = _mm256_fmadd_ps(_mm256_mul_ps(r, r), p, r);
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    const __m256 power = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
    return _mm256_fmadd_ps(power, p, _mm256_sub_ps(power, constant(1.0f)));
}

INLINE FOR_AVX2 __m256 sigmoid(__m256 x)
{
    const __m256 e = exponential_less_1(_mm256_sub_ps(_mm256_setzero_ps(), x), 87.0f);
    return _mm256_div_ps(constant(1.0f), _mm256_add_ps(constant(2.0f), e));
}

INLINE FOR_AVX2 __m256 tangent(__m256 x)
{
    const __m256 e = exponential_less_1(_mm256_add_ps(x, x), 60.0f);
    return _mm256_div_ps(e, _mm256_add_ps(e, constant(2.0f)));
}

#define LOAD(p) _mm256_maskload_ps(p, mask)
#define GATE(g) _mm256_add_ps(LOAD(x + (g) * n + i), LOAD(h + (g) * n + i))

FOR_AVX2 static void lstm_step(const float *x, const float *h, int64_t n, float *c, float *y)
{
    for (int64_t i = 0; i < n; i += 8) {
        const __m256i mask = there(n - i);
        const __m256 fresh = _mm256_mul_ps(sigmoid(GATE(0)), tangent(GATE(2)));
        const __m256 cell = _mm256_fmadd_ps(sigmoid(GATE(1)), LOAD(c + i), fresh);
        _mm256_maskstore_ps(c + i, mask, cell);
        _mm256_maskstore_ps(y + i, mask, _mm256_mul_ps(sigmoid(GATE(3)), tangent(cell)));
    }
}

FOR_AVX2 static void gru_step(const float *x, const float *h, int64_t n, float *state)
{
    for (int64_t i = 0; i < n; i += 8) {
        const __m256i mask = there(n - i);
        const __m256 reset = sigmoid(GATE(0)), update = sigmoid(GATE(1));
        const __m256 fresh = tangent(_mm256_fmadd_ps(reset, LOAD(h + 2 * n + i), LOAD(x + 2 * n + i)));
        _mm256_maskstore_ps(state + i, mask,
            _mm256_fmadd_ps(update, _mm256_sub_ps(LOAD(state + i), fresh), fresh));
    }
}

FOR_AVX2 static void rnn_step(const float *x, const float *h, int64_t n, int relu, float *state)
{
    for (int64_t i = 0; i < n; i += 8) {
        const __m256i mask = there(n - i);
        const __m256 sum = GATE(0); /* of a maximum, the second one where one is NaN */
        _mm256_maskstore_ps(state + i, mask, relu ? _mm256_max_ps(_mm256_setzero_ps(), sum) : tangent(sum));
    }
}

/* ---- a layer ---- */

struct work {
    const struct layer *layer;
    int64_t at_once; /* rows of a block, at most ROWS */
    _Atomic int failed; /* set by any thread */
};

static int allocate(const struct layer *l, struct scratch *s)
{
    const int64_t gates = l->input.outputs,
        padded = (gates > l->projection.outputs ? gates : l->projection.outputs) + PANEL;
    int64_t inputs = l->input.inputs > l->how->state ? l->input.inputs : l->how->state;
    inputs = inputs > l->how->hidden ? inputs : l->how->hidden;
    s->stride = (inputs + 63) / 64 * 64;
    s->codes = calloc(ROWS, s->stride);
    s->sums = malloc(ROWS * padded * sizeof *s->sums);
    s->values = malloc(ROWS * gates * sizeof *s->values);
    s->before = malloc(ROWS * l->how->hidden * sizeof *s->before);
    return s->codes && s->sums && s->values && s->before;
}

static void release(struct scratch *s)
{
    free(s->codes);
    free(s->sums);
    free(s->values);
    free(s->before);
}

/* The part of all blocks that one thread computes. */
static void blocks_of(int64_t count, int64_t at_once, int64_t part, int64_t parts, int64_t *start,
    int64_t *stop)
{
    const int64_t blocks = (count + at_once - 1) / at_once;
    *start = blocks * part / parts * at_once;
    *stop = blocks * (part + 1) / parts * at_once;
    *stop = *stop < count ? *stop : count;
}

/* Input gates of all steps. */
static void input_gates(void *data, int64_t part, int64_t parts)
{
    struct work *w = data;
    const struct layer *l = w->layer;
    const int64_t width = l->input.outputs;
    struct scratch s;
    int64_t start, stop;
    if (!allocate(l, &s))
        w->failed = 1;
    else {
        blocks_of(l->how->steps * l->how->rows, ROWS, part, parts, &start, &stop);
        for (int64_t i = start; i < stop;) { /* rows of one step at a time */
            const int64_t step = i / l->how->rows, row = i % l->how->rows;
            int64_t count = l->how->rows - row < stop - i ? l->how->rows - row : stop - i;
            const int64_t stride = l->how->rows == 1 ? l->how->x_step : l->how->x_row;
            if (l->how->rows == 1)
                count = stop - i;
            count = count < ROWS ? count : ROWS;
            const float *x = l->x + step * l->how->x_step + row * l->how->x_row;
            if (l->how->float_input)
                float_product(&l->input, x, stride, l->gates + i * width, width, (int)count);
            else
                product(l, &l->input, x, stride, l->gates + i * width, width, (int)count, &s);
            i += count;
        }
    }
    release(&s);
}

static void one_step(const struct layer *l, int64_t step, int64_t row, int rows, const struct scratch *s)
{
    const int64_t width = l->input.outputs, hidden = l->how->hidden;
    float *h = l->h + row * l->how->state;
    product(l, &l->recurrent, h, l->how->state, s->values, width, rows, s);
    for (int r = 0; r < rows; r++) {
        const float *x = l->gates + (step * l->how->rows + row + r) * width, *values = s->values + r * width;
        float *state = h + r * l->how->state;
        if (l->how->cell == CELL_LSTM)
            lstm_step(x, values, hidden, l->c + (row + r) * hidden,
                l->projection.outputs ? s->before + r * hidden : state);
        else if (l->how->cell == CELL_GRU)
            gru_step(x, values, hidden, state);
        else
            rnn_step(x, values, hidden, l->how->cell == CELL_RNN_RELU, state);
    }
    if (l->projection.outputs)
        product(l, &l->projection, s->before, hidden, h, l->how->state, rows, s);
    for (int r = 0; r < rows; r++)
        memcpy(l->y + step * l->how->y_step + (row + r) * l->how->y_row, h + r * l->how->state,
            l->how->state * sizeof *h);
}

/* All steps of some rows. */
static void all_steps(void *data, int64_t part, int64_t parts)
{
    struct work *w = data;
    const struct layer *l = w->layer;
    struct scratch s;
    int64_t start, stop;
    if (!allocate(l, &s))
        w->failed = 1;
    else {
        blocks_of(l->how->rows, w->at_once, part, parts, &start, &stop);
        for (int64_t row = start; row < stop; row += w->at_once) {
            const int64_t rows = stop - row < w->at_once ? stop - row : w->at_once;
            for (int64_t i = 0; i < l->how->steps; i++)
                one_step(l, l->how->reverse ? l->how->steps - 1 - i : i, row, (int)rows, &s);
        }
    }
    release(&s);
}

/* What a caller must see to. */
static int check(const struct nc_recurrent *how, int has_projection)
{
    EXPECT(how->isa >= ISA_AVX2 && how->isa <= ISA_AMX && nc_may_use() >> how->isa & 1, NOT_HERE);
    EXPECT(how->cell >= CELL_LSTM && how->cell <= CELL_RNN_RELU, OTHER_OPERATION);
    EXPECT(how->threads >= 1 && how->steps >= 0 && how->rows >= 0 && how->hidden >= 1 && how->state >= 1,
        OTHER_SIZE);
    EXPECT(how->features >= 0 && how->features <= MOST_INPUTS && how->state <= MOST_INPUTS
        && how->hidden <= MOST_INPUTS, OTHER_SIZE);
    EXPECT(has_projection ? how->cell == CELL_LSTM : how->state == how->hidden, OTHER_SIZE);
    return OK;
}

static struct matrix matrix_of(int64_t outputs, int64_t inputs, char *const *tensors)
{
    return (struct matrix){outputs, inputs, (const int8_t *)tensors[0], (const float *)tensors[1],
        (const int32_t *)tensors[2], (const float *)tensors[3]};
}

/* tensors: y, x, h, c, gates, see struct layer; for the matrices of input, state and projection codes, scale,
 * sums and bias. What a layer has not has no address. */
int nc_recurrent(const struct nc_recurrent *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_recurrent);
    static const int64_t gates[] = {[CELL_LSTM] = 4, [CELL_GRU] = 3, [CELL_RNN] = 1, [CELL_RNN_RELU] = 1};
    const int has_projection = tensors[13] != NULL;
    const int wrong = check(how, has_projection);
    EXPECT(!wrong, wrong);
    const int64_t width = gates[how->cell] * how->hidden,
        each = (how->rows + how->threads - 1) / how->threads;
    const struct layer layer = {how, (const float *)tensors[1], (float *)tensors[0], (float *)tensors[2],
        (float *)tensors[3], (float *)tensors[4], matrix_of(width, how->features, tensors + 5),
        matrix_of(width, how->state, tensors + 9),
        matrix_of(has_projection ? how->state : 0, how->hidden, tensors + 13)};
    struct work w = {&layer, each < ROWS ? each : ROWS, 0};
    if (!how->rows || !how->steps)
        return OK;
    EXPECT(how->cell != CELL_LSTM || layer.c, OTHER_TENSORS);
    in_parts(input_gates, &w, (how->steps * how->rows + ROWS - 1) / ROWS, how->threads);
    in_parts(all_steps, &w, (how->rows + w.at_once - 1) / w.at_once, how->threads);
    return w.failed ? NO_MEMORY : OK;
}

CODE_FOR(1 << ISA_AVX2 | 1 << ISA_AVX512_VNNI)

#else

int nc_recurrent(const struct nc_recurrent *how, void *unused, int count, char *const *tensors)
{
    TAKES(nc_recurrent);
    (void)tensors;
    return NOT_HERE;
}

CODE_FOR(0)

#endif
