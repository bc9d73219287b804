/* Attention of int8 codes at once, for CPUs with AVX512-VNNI: scores, softmax and its codes, sums of values.
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
#include "attention.h"
#include "exponential.h"
#include "texts.h"

_Static_assert(WIDEST_HEAD % 16 == 0, "rows of q are read 16 codes at a time");

struct job {
    const struct nc_int8_attention *how;
    char *const *tensors;
};

/* Memory of one thread; keys and values in the order in which they are multiplied, 16 outputs side by side, 4
 * inputs behind each other. */
struct room {
    int8_t *keys, *values;
    int32_t *of_keys; /* what the zero points of q and k take off each sum */
    float *scores, *sums;
    uint8_t *codes;
};

static struct room room_of(char *memory, const struct nc_int8_attention *how)
{
    const int64_t keys = up(how->keys, 16), wide = up(how->wide, 16);
    struct room room;
    room.keys = (int8_t *)memory;
    room.values = room.keys + keys * up(how->width, 4);
    room.of_keys = (int32_t *)(room.values + keys * wide);
    room.scores = (float *)(room.of_keys + keys);
    room.sums = room.scores + SCORE_ROWS * keys;
    room.codes = (uint8_t *)(room.sums + SCORE_ROWS * wide);
    return room;
}

/* Bytes of it. */
static int64_t bytes_of_room(const struct nc_int8_attention *how)
{
    const int64_t keys = up(how->keys, 16), wide = up(how->wide, 16);
    return keys * (up(how->width, 4) + wide + 4 + SCORE_ROWS * (4 + 1)) + SCORE_ROWS * wide * 4;
}

/* Keys [keys, width] as [keys / 16][width / 4][16][4]; what is missing is 0. */
FOR_VNNI static void pack_keys(const struct nc_int8_attention *how, const int8_t *k, const struct room *room)
{
    const int64_t width = how->width, groups = up(width, 4) / 4, zero_q = how->q_zero_point,
        zero_k = how->k_zero_point;
    for (int64_t block = 0; block * 16 < how->keys; block++) {
        int8_t *to = room->keys + block * groups * 64;
        for (int64_t j = 0; j < 16; j++) {
            const int64_t key = block * 16 + j;
            const int8_t *from = k + key * how->k_strides[2];
            if (key >= how->keys) {
                for (int64_t t = 0; t < groups; t++)
                    memset(to + t * 64 + j * 4, 0, 4);
                continue;
            }
            for (int64_t t = 0; t < width / 4; t++)
                memcpy(to + t * 64 + j * 4, from + t * 4, 4);
            if (width % 4) {
                memset(to + (groups - 1) * 64 + j * 4, 0, 4);
                memcpy(to + (groups - 1) * 64 + j * 4, from + width / 4 * 4, (size_t)(width % 4));
            }
        }
        __m512i sums = _mm512_setzero_si512();
        for (int64_t t = 0; t < groups; t++)
            sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), _mm512_loadu_si512(to + t * 64));
        sums = _mm512_mullo_epi32(sums, _mm512_set1_epi32((int)-zero_q));
        _mm512_storeu_si512(room->of_keys + block * 16,
            _mm512_add_epi32(sums, _mm512_set1_epi32((int)(width * zero_q * zero_k))));
    }
}

/* Values [keys, wide] as [wide / 16][keys / 4][16][4]. */
FOR_VNNI static void pack_values(const struct nc_int8_attention *how, const int8_t *v,
    const struct room *room)
{
    const int64_t groups = up(how->keys, 16) / 4;
    for (int64_t block = 0; block * 16 < how->wide; block++) {
        const __mmask16 lanes = lanes_of(how->wide - block * 16);
        int8_t *to = room->values + block * groups * 64;
        for (int64_t t = 0; t < groups; t++) {
            __m128i rows[4];
            for (int64_t i = 0; i < 4; i++) {
                const int64_t key = t * 4 + i;
                const int8_t *row = v + (key < how->keys ? key : 0) * how->v_strides[2];
                rows[i] = _mm_maskz_loadu_epi8(key < how->keys ? lanes : 0, row + block * 16);
            }
            const __m128i a = _mm_unpacklo_epi8(rows[0], rows[1]), b = _mm_unpackhi_epi8(rows[0], rows[1]);
            const __m128i c = _mm_unpacklo_epi8(rows[2], rows[3]), d = _mm_unpackhi_epi8(rows[2], rows[3]);
            _mm_storeu_si128((__m128i *)(to + t * 64), _mm_unpacklo_epi16(a, c));
            _mm_storeu_si128((__m128i *)(to + t * 64 + 16), _mm_unpackhi_epi16(a, c));
            _mm_storeu_si128((__m128i *)(to + t * 64 + 32), _mm_unpacklo_epi16(b, d));
            _mm_storeu_si128((__m128i *)(to + t * 64 + 48), _mm_unpackhi_epi16(b, d));
        }
    }
}

/* What follows a product: `n` columns of one row. */
INLINE FOR_VNNI void follow(const struct job *job, int64_t first, int64_t count, int64_t batch, int64_t head,
    int64_t row, float *x, int64_t n)
{
    for (int64_t i = first; i < first + count; i++) {
        const int64_t kind = job->how->followers[i], *strides = job->how->follower_strides[i];
        const float *from =
            (const float *)job->tensors[5 + i] + batch * strides[0] + head * strides[1] + row * strides[2];
        for (int64_t j = 0; j < n; j += 16) {
            const __m512 y =
                strides[3] ? _mm512_maskz_loadu_ps(lanes_of(n - j), from + j) : _mm512_set1_ps(*from);
            const __m512 old = _mm512_loadu_ps(x + j);
            _mm512_storeu_ps(x + j, kind == FOLLOW_ADD ? _mm512_add_ps(old, y) : _mm512_mul_ps(old, y));
        }
    }
}

/* Scores of `rows` rows with `blocks` blocks of keys. `taken`: what the zero point of k takes off each sum of
 * a row. */
INLINE FOR_VNNI void score(const int rows, const int blocks, const struct job *job, const struct room *room,
    const uint8_t *q, const int32_t *taken, int64_t block)
{
    const int64_t groups = up(job->how->width, 4) / 4, keys = up(job->how->keys, 16);
    const __m512 factor = _mm512_set1_ps((float)job->how->score);
    __m512i sums[SCORE_ROWS][BLOCKS_AT_ONCE];
    multiply(rows, blocks, q, groups * 4, room->keys + block * groups * 64, groups * 64, groups, sums);
    for (int r = 0; r < rows; r++) {
        const __m512i off = _mm512_set1_epi32(taken[r]);
        for (int c = 0; c < blocks; c++) {
            const __m512i exact = _mm512_add_epi32(sums[r][c],
                _mm512_sub_epi32(_mm512_loadu_si512(room->of_keys + (block + c) * 16), off));
            _mm512_storeu_ps(room->scores + r * keys + (block + c) * 16,
                _mm512_mul_ps(_mm512_cvtepi32_ps(exact), factor));
        }
    }
}

/* uint8 codes of values that are multiples of the scale; what is no number becomes 0. */
INLINE FOR_VNNI __m128i codes_of_16(__m512 x)
{
    const __m512 limited = _mm512_min_ps(_mm512_max_ps(x, _mm512_setzero_ps()), _mm512_set1_ps(255.0f));
    return _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(limited));
}

/* Codes of the softmax of `rows` rows of n scores, up to the next multiple of 16, and their sums. Rows do not
 * wait for each other. */
INLINE FOR_VNNI void softmax(const int rows, float *e, uint8_t *codes, int64_t n, float inverse,
    int64_t *total)
{
    const int64_t keys = up(n, 16), last = keys - 16;
    __m512 most[SCORE_ROWS], sum[SCORE_ROWS];
    __m128i sums[SCORE_ROWS];
    for (int r = 0; r < rows; r++) {
        most[r] = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), lanes_of(n - last), e + r * keys + last);
        _mm512_storeu_ps(e + r * keys + last, most[r]);
        sum[r] = _mm512_setzero_ps();
        sums[r] = _mm_setzero_si128();
    }
    for (int64_t i = 0; i < last; i += 16)
        for (int r = 0; r < rows; r++)
            most[r] = _mm512_max_ps(most[r], _mm512_loadu_ps(e + r * keys + i));
    for (int r = 0; r < rows; r++)
        most[r] = _mm512_set1_ps(_mm512_reduce_max_ps(most[r]));
    for (int64_t i = 0; i <= last; i += 16)
        for (int r = 0; r < rows; r++) {
            const __m512 x = exponential_of_16(_mm512_sub_ps(_mm512_loadu_ps(e + r * keys + i), most[r]));
            _mm512_storeu_ps(e + r * keys + i, x);
            sum[r] = _mm512_add_ps(sum[r], x);
        }
    for (int r = 0; r < rows; r++)
        sum[r] = _mm512_set1_ps(inverse / _mm512_reduce_add_ps(sum[r]));
    for (int64_t i = 0; i <= last; i += 16)
        for (int r = 0; r < rows; r++) {
            const __m128i found = codes_of_16(_mm512_mul_ps(_mm512_loadu_ps(e + r * keys + i), sum[r]));
            _mm_storeu_si128((__m128i *)(codes + r * keys + i), found);
            sums[r] = _mm_add_epi64(sums[r], _mm_sad_epu8(found, _mm_setzero_si128()));
        }
    for (int r = 0; r < rows; r++)
        total[r] = _mm_extract_epi64(sums[r], 0) + _mm_extract_epi64(sums[r], 1);
}

/* Sums of values for `rows` rows and `blocks` blocks of columns, instead of scores. `total`: sums of codes of
 * probabilities. */
INLINE FOR_VNNI void weigh(const int rows, const int blocks, const struct job *job, const struct room *room,
    const int64_t *total, int64_t block)
{
    const int64_t keys = up(job->how->keys, 16), wide = up(job->how->wide, 16);
    const __m512 factor = _mm512_set1_ps((float)job->how->value);
    __m512i sums[SCORE_ROWS][BLOCKS_AT_ONCE];
    multiply(rows, blocks, room->codes, keys, room->values + block * keys * 16, keys * 16, keys / 4, sums);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < blocks; c++) {
            const __m512i exact =
                _mm512_sub_epi32(sums[r][c], _mm512_set1_epi32((int)(job->how->v_zero_point * total[r])));
            _mm512_storeu_ps(room->sums + r * wide + (block + c) * 16,
                _mm512_mul_ps(_mm512_cvtepi32_ps(exact), factor));
        }
}

/* A row of the result: in fp32, or as codes. */
INLINE FOR_VNNI void put(const struct job *job, const float *x, int64_t at)
{
    const struct nc_int8_attention *how = job->how;
    const __m512 inverse = _mm512_set1_ps((float)job->how->inverse),
        zero = _mm512_set1_ps((float)how->y_zero_point);
    const __m512 low = _mm512_sub_ps(_mm512_setzero_ps(), zero),
        high = _mm512_sub_ps(_mm512_set1_ps(255.0f), zero);
    for (int64_t i = 0; i < how->wide; i += 16) {
        const __mmask16 lanes = lanes_of(how->wide - i);
        __m512 y = _mm512_loadu_ps(x + i);
        if (how->to == DTYPE_F32) {
            _mm512_mask_storeu_ps((float *)job->tensors[0] + at + i, lanes, y);
            continue;
        }
        y = _mm512_roundscale_ps(_mm512_mul_ps(y, inverse), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        y = _mm512_add_ps(_mm512_min_ps(_mm512_max_ps(y, low), high), zero);
        _mm_mask_storeu_epi8((uint8_t *)job->tensors[0] + at + i, lanes,
            _mm512_cvtusepi32_epi8(_mm512_cvtps_epi32(y)));
    }
}

/* Some rows of one head. */
INLINE FOR_VNNI void attend(const int rows, const struct job *job, const struct room *room, int64_t batch,
    int64_t head, int64_t row)
{
    const struct nc_int8_attention *how = job->how;
    const int64_t width = how->width, padded = up(width, 4), keys = up(how->keys, 16),
        wide = up(how->wide, 16);
    uint8_t q[SCORE_ROWS * WIDEST_HEAD + 16];
    int32_t taken[SCORE_ROWS];
    int64_t total[SCORE_ROWS], block = 0;
    for (int r = 0; r < rows; r++) {
        const int64_t at =
            batch * how->q_strides[0] + head * how->q_strides[1] + (row + r) * how->q_strides[2];
        const uint8_t *from = (const uint8_t *)job->tensors[1] + at;
        __m128i sums = _mm_setzero_si128();
        /* what is written behind a row is overwritten by the next */
        for (int64_t i = 0; i < width; i += 16) {
            const __m128i codes = _mm_maskz_loadu_epi8(lanes_of(width - i), from + i);
            _mm_storeu_si128((__m128i *)(q + r * padded + i), codes);
            sums = _mm_add_epi64(sums, _mm_sad_epu8(codes, _mm_setzero_si128()));
        }
        taken[r] = (_mm_extract_epi32(sums, 0) + _mm_extract_epi32(sums, 2)) * (int32_t)how->k_zero_point;
    }
    for (; block + 4 <= keys / 16; block += 4)
        score(rows, 4, job, room, q, taken, block);
    for (; block < keys / 16; block++)
        score(rows, 1, job, room, q, taken, block);
    for (int r = 0; r < rows; r++)
        follow(job, 0, how->before, batch, head, row + r, room->scores + r * keys, how->keys);
    softmax(rows, room->scores, room->codes, how->keys, (float)job->how->inverse_probability, total);
    for (block = 0; block + 4 <= wide / 16; block += 4)
        weigh(rows, 4, job, room, total, block);
    if (block + 2 <= wide / 16) {
        weigh(rows, 2, job, room, total, block);
        block += 2;
    }
    if (block < wide / 16)
        weigh(rows, 1, job, room, total, block);
    for (int r = 0; r < rows; r++) {
        follow(job, how->before, how->behind, batch, head, row + r, room->sums + r * wide, how->wide);
        put(job, room->sums + r * wide,
            batch * how->y_strides[0] + head * how->y_strides[1] + (row + r) * how->y_strides[2]);
    }
}

FOR_VNNI static void pack_head(const struct job *job, const struct room *room, int64_t batch, int64_t head)
{
    const struct nc_int8_attention *how = job->how;
    pack_keys(how, (const int8_t *)job->tensors[2] + batch * how->k_strides[0] + head * how->k_strides[1], room);
    pack_values(how, (const int8_t *)job->tensors[3] + batch * how->v_strides[0] + head * how->v_strides[1],
        room);
}

FOR_VNNI static void attend_rows(const struct job *job, const struct room *room, int64_t batch, int64_t head,
    int64_t row, int64_t end)
{
    for (; row + SCORE_ROWS <= end; row += SCORE_ROWS)
        attend(SCORE_ROWS, job, room, batch, head, row);
    for (; row < end; row++)
        attend(1, job, room, batch, head, row);
}

FOR_VNNI static void work(void *data, int64_t part, int64_t parts)
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

FOR_VNNI static void attend_text(void *data, int64_t text, int64_t head, int64_t first, int64_t end)
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
    EXPECT(nc_may_use() >> ISA_AVX512_VNNI & 1, NOT_HERE);
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

int64_t nc_isas(void) { return 1 << ISA_AVX512_VNNI; }
