/* The parts of the C code that threads share, under the thread sanitizer: `make sanitize` compiles this file
 * once for each source.
 *
 * Threads are those of POSIX, which the sanitizer knows, in the place of OpenMP's, which it does not. What is
 * covered: how a function divides its work (in_parts), what parts write, and the mark that any of them may
 * set. What is not: torch's threads, lists of calls, and what instructions with masks and tiles of AMX read
 * and write, which the compiler does not instrument.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

/* While it is set, the source gets no memory of zeros. */
static int no_memory;
#define calloc(count, size) (no_memory ? NULL : (calloc)(count, size))

#include SOURCE

enum { TEAM = 4 };
static __thread int number;
static unsigned team;
static void (*body)(void *);
static void *given;

static int my_number(void) { return number; }
static int my_team(void) { return (int)team; }

static void *member(void *which)
{
    number = (int)(intptr_t)which;
    body(given);
    return NULL;
}

static void parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags)
{
    pthread_t others[TEAM];
    (void)flags;
    team = threads, body = function, given = data;
    for (unsigned i = 1; i < threads; i++)
        pthread_create(&others[i], NULL, member, (void *)(intptr_t)i);
    member(NULL);
    for (unsigned i = 1; i < threads; i++)
        pthread_join(others[i], NULL);
}

static float *floats(int64_t count)
{
    float *x = malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++)
        x[i] = (float)(i * 7919 % 1000) / 500 - 1;
    return x;
}

/* Whether this CPU has an instruction set of abi.py, and the library was compiled for it. */
static int can_run(int64_t isa)
{
    const int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                       && __builtin_cpu_supports("avx512vl");
    const int vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    switch (nc_isas() >> isa & 1 ? isa : -1) {
    case ISA_AVX2: return __builtin_cpu_supports("avx2");
    case ISA_AVX_VNNI: return __builtin_cpu_supports("avxvnni");
    case ISA_AVX512: return avx512;
    case ISA_AVX512_VNNI: return vnni;
    case ISA_AVX512_BF16: return vnni && __builtin_cpu_supports("avx512bf16");
    case ISA_AMX: /* ARCH_REQ_XCOMP_PERM of XFEATURE_XTILEDATA: the CPU has tiles, and the system gives them */
        return vnni && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    default: return 0;
    }
}

/* A structure of abi.py with its size. */
#define HOW(function, ...) struct function how = {.size = sizeof how, __VA_ARGS__}
#define CALL(function, tensors)                                                                              \
    function(&how, NULL, (int)(sizeof(tensors) / sizeof *(tensors)), (char *const *)(tensors))

#ifdef LOW_BIT
static int work_of_all(void)
{
    enum { N = 512, K = 512, M = 64, GROUP = 64 };
    float *x = floats(M * K), *scale = floats(N * K / GROUP), *offset = floats(N * K / GROUP),
          *y = floats(M * N), table[16] = {0};
    struct nc_low_bit_weight weight = {
        sizeof weight, N, K, K, GROUP, .bits = 8, .middle = 128, .scale_dtype = DTYPE_F32};
    void *tensors[] = {y, x, &weight, calloc(N * K, 1), scale, offset, table, NULL};
    for (int isa = 0; isa <= ISA_AMX; isa++)
        for (int64_t block = -1; block <= 32; block += block < 0 ? 1 : 32)
            for (int unfit = 0; unfit < 2; unfit++) {
                HOW(nc_low_bit, .rows = M, .stride = K, .block = block, .threads = TEAM);
                weight.isa = isa;
                x[K / 2] = x[(M - 1) * K] = unfit ? INFINITY : 1; /* in rows of several threads */
                if (!can_run(isa))
                    continue;
                if (CALL(nc_low_bit, tensors))
                    return 1;
            }
    return 0;
}
#elif defined(LOW_BIT_BLOCKS)
static int work_of_all(void)
{
    enum { N = 512, K = 240, M = 40, ALL = N * (K / 20) };
    float *x = floats(M * K), *offset = floats(ALL), *values = floats(PANEL + N);
    struct nc_low_bit_blocks_weight weight = {sizeof weight, N, K, .scale_dtype = DTYPE_F32};
    void *tensors[] = {floats(M * N), x, &weight, calloc(N * 2 * K, 1), floats(ALL), offset, values, NULL};
    static const int64_t blocks[] = {BLOCK_BF16, BLOCK_ROW, 0, 32}, isas[] = {ISA_AVX2, ISA_AVX512, ISA_AMX},
                         most[] = {3, M};
    for (int i = 0; i < 3 * 4 * 2 * 4 * 2 * 2; i++) {
        const int64_t isa = isas[i % 3], rows = most[i / 12 % 2], unfit = i / 96 % 2,
                      group = i / 192 ? 20 : 40;
        HOW(nc_low_bit_blocks, .rows = rows, .stride = K, .block = blocks[i / 3 % 4], .threads = TEAM);
        weight.groups = K / group, weight.held = (group + 7) / 8 * 8;
        weight.coding = i / 24 % 4, weight.parts = 1 + i / 3 % 3, weight.isa = isa;
        tensors[5] = i % 5 ? offset : NULL, tensors[7] = i % 2 ? values : NULL;
        x[K / 2] = x[(rows - 1) * K] = unfit ? INFINITY : 1; /* in rows of several threads */
        if (!can_run(isa))
            continue;
        if (CALL(nc_low_bit_blocks, tensors))
            return 1;
    }
    return 0;
}
#elif defined(RECURRENT)
/* Codes, scale, sums and bias of a matrix. */
static void add_matrix(void **tensors, int64_t outputs, int64_t inputs)
{
    const int64_t panels = (outputs + PANEL - 1) / PANEL, words = (inputs + WORD - 1) / WORD;
    tensors[0] = calloc(panels * words, WORD * PANEL), tensors[1] = floats(outputs);
    tensors[2] = calloc(outputs, 4), tensors[3] = floats(outputs);
}

static int work_of_all(void)
{
    enum { STEPS = 12, MOST_ROWS = 11, FEATURES = 40, HIDDEN = 24 };
    static const int64_t gates[] = {4, 3, 1, 1};
    void *tensors[17] = {floats(STEPS * MOST_ROWS * HIDDEN), floats(STEPS * MOST_ROWS * FEATURES),
        floats(MOST_ROWS * HIDDEN), floats(MOST_ROWS * HIDDEN), floats(STEPS * MOST_ROWS * 4 * HIDDEN)};
    for (int i = 0; i < 2 * 4 * 2 * 2; i++) {
        const int64_t isa = i % 2 ? ISA_AVX512_VNNI : ISA_AVX2, cell = i / 2 % 4,
                      rows = i / 8 % 2 ? MOST_ROWS : 1;
        const int64_t projected = cell == CELL_LSTM && i / 16 ? 8 : 0, state = projected ? projected : HIDDEN,
                      width = gates[cell] * HIDDEN;
        HOW(nc_recurrent, .cell = cell, .isa = isa, .threads = TEAM, .reverse = i / 8 % 2, .steps = STEPS,
            .rows = rows, .features = FEATURES, .hidden = HIDDEN, .state = state, .x_step = rows * FEATURES,
            .x_row = FEATURES, .y_step = rows * state, .y_row = state);
        add_matrix(tensors + 5, width, FEATURES);
        add_matrix(tensors + 9, width, state);
        tensors[13] = NULL;
        if (projected)
            add_matrix(tensors + 13, projected, HIDDEN);
        if (!can_run(isa))
            continue;
        if (CALL(nc_recurrent, tensors))
            return 1;
        no_memory = 1; /* which each thread says */
        if (CALL(nc_recurrent, tensors) != NO_MEMORY)
            return 1;
        no_memory = 0;
    }
    return 0;
}
#elif defined(ATTENTION)
#define NEEDS ISA_AVX2
static int work_of_all(void)
{
    enum { HEADS = 3, ROWS = 40, KEYS = 64, WIDE = 64 };
    const int64_t each = ROWS * WIDE, size = KEYS * WIDE, bytes = 1 << 18;
    HOW(nc_int8_attention, .batch = 1, .heads = HEADS, .rows = ROWS, .keys = KEYS, .width = WIDE,
        .wide = WIDE, .q_strides = {HEADS * each, each, WIDE}, .k_strides = {HEADS * size, size, WIDE},
        .v_strides = {HEADS * size, size, WIDE}, .y_strides = {HEADS * each, each, WIDE}, .q_zero_point = 1,
        .k_zero_point = 2, .v_zero_point = 3, .score = 0.001, .inverse_probability = 255, .value = 0.001,
        .inverse = 1, .to = DTYPE_F32, .parts = 2, .bytes = bytes, .threads = TEAM,
        .isa = NEEDS);
    void *tensors[] = {floats(HEADS * each), calloc(HEADS * each, 1), calloc(HEADS * size, 1),
        calloc(HEADS * size, 1), aligned_alloc(64, TEAM * bytes)};
    return CALL(nc_int8_attention, tensors);
}
#elif defined(FLOAT_ATTENTION)
#define NEEDS ISA_AVX512
static int work_of_all(void)
{
    enum { HEADS = 3, ROWS = 40, KEYS = 64, WIDE = 64 };
    const int64_t each = ROWS * WIDE, size = KEYS * WIDE, bytes = 1 << 18;
    HOW(nc_float_attention, .batch = 1, .heads = HEADS, .group = 1, .rows = ROWS, .keys = KEYS,
        .width = WIDE, .wide = WIDE, .mask = MASK_NONE, .q_strides = {HEADS * each, each, WIDE},
        .k_strides = {HEADS * size, size, WIDE}, .v_strides = {HEADS * size, size, WIDE},
        .y_strides = {HEADS * each, each, WIDE}, .factor = 0.1, .parts = 2, .bytes = bytes, .threads = TEAM);
    void *tensors[] = {floats(HEADS * each), floats(HEADS * each), floats(HEADS * size),
        floats(HEADS * size), aligned_alloc(64, TEAM * bytes)};
    return CALL(nc_float_attention, tensors);
}
#elif defined(FLASH)
#define NEEDS ISA_AVX2
static int work_of_all(void)
{
    enum { HEADS = 3, ROWS = 240, WIDE = 64 };
    const int64_t each = ROWS * WIDE, bytes = 1 << 19;
    int32_t starts[] = {0, 1, 130, 130, ROWS};
    HOW(nc_flash, .texts = 4, .heads = HEADS, .group = 1, .rows = ROWS, .keys = ROWS, .width = WIDE,
        .wide = WIDE, .dtype = DTYPE_F32, .left = -1, .right = -1, .q_strides = {WIDE, each},
        .k_strides = {WIDE, each}, .v_strides = {WIDE, each}, .y_strides = {WIDE, each}, .factor = 0.1,
        .bytes = bytes, .threads = TEAM, .isa = ISA_AVX2);
    void *tensors[] = {floats(HEADS * each), floats(HEADS * each), floats(HEADS * each), floats(HEADS * each),
        starts, starts, aligned_alloc(64, TEAM * bytes)};
    return CALL(nc_flash, tensors);
}
#elif defined(DYNAMIC_ATTENTION)
#define NEEDS ISA_AVX512_VNNI
static int work_of_all(void)
{
    enum { HEADS = 3, ROWS = 40, KEYS = 64, WIDE = 64 };
    const int64_t each = ROWS * WIDE, size = KEYS * WIDE, bytes = 1 << 18;
    HOW(nc_dynamic_attention, .batch = 1, .heads = HEADS, .rows = ROWS, .keys = KEYS, .width = WIDE,
        .wide = WIDE, .mask = MASK_NONE, .q_strides = {HEADS * each, each, WIDE},
        .k_strides = {HEADS * size, size, WIDE}, .v_strides = {HEADS * size, size, WIDE},
        .y_strides = {HEADS * each, each, WIDE}, .factor = 0.1, .parts = 2, .bytes = bytes, .threads = TEAM);
    void *tensors[] = {floats(HEADS * each), floats(HEADS * each), floats(HEADS * size),
        floats(HEADS * size), aligned_alloc(64, TEAM * bytes)};
    return CALL(nc_dynamic_attention, tensors);
}
#elif defined(ROWS)
/* Many rows, which threads share by pieces, and few ones. */
static int chained_by_all(void)
{
    enum { M = 2048, K = 64, N = 64 };
    char *given = aligned_alloc(64, M * (K + 8)), *rounded = aligned_alloc(64, M * (N + 8));
    memset(given, 1, M * (K + 8));
    void *tensors[] = {rounded, floats(M * N), floats(M * N), given, calloc(N * K, 1), calloc(N, 4),
        floats(N), floats(N), NULL, floats(N), floats(N)};
    for (int i = 0; i < 4; i++) {
        HOW(nc_row_chain, .rows = i % 2 ? M : 70, .inputs = K, .outputs = N, .threads = TEAM, .isa = ISA_AVX2,
            .norm = NORM_LAYER, .epsilon = 1e-5, .keeps = i / 2);
        if (CALL(nc_row_chain, tensors))
            return 1;
    }
    void *normed[] = {rounded, tensors[2], tensors[1], tensors[9], tensors[10]};
    HOW(nc_norm_rows, .rows = M, .inputs = N, .stride = N, .threads = TEAM, .isa = ISA_AVX2, .norm = NORM_RMS,
        .epsilon = 1e-5);
    return CALL(nc_norm_rows, normed);
}

static int work_of_all(void)
{
    enum { M = 70, K = 200, N = 300, HELD = 80, DEEP = 256, WIDE = 320 };
    char *rounded = aligned_alloc(64, HELD * (DEEP + 8));
    void *to_round[] = {rounded, floats(M * K), floats(M * 2)};
    void *tensors[] = {
        floats(M * N), rounded, calloc(WIDE * DEEP, 1), calloc(WIDE, 4), floats(WIDE), floats(WIDE)};
    const int64_t isas[] = {ISA_AVX2, ISA_AVX512_VNNI, ISA_AMX};
    for (int i = 0; i < 6; i++) {
        const int64_t isa = isas[i % 3], rows = i / 3 ? M : 1;
        HOW(nc_round_rows, .rows = rows, .inputs = K, .stride = K, .symmetric = i / 3, .threads = TEAM,
            .per_row = i % 2, .isa = isa);
        struct nc_row_product product = {.size = sizeof product, .rows = rows, .inputs = K, .outputs = N,
            .threads = TEAM, .isa = isa, .activation = ACTIVATION_GELU_ERF};
        if (!can_run(isa))
            continue;
        if (CALL(nc_round_rows, to_round) || nc_row_product(&product, NULL, 6, (char *const *)tensors))
            return 1;
        struct nc_code_product of_codes = {.size = sizeof of_codes, .threads = TEAM, .outputs = N, .rows = rows,
            .to = i % 2 ? DTYPE_U8 : DTYPE_F32, .inputs = DEEP - 64, .stride = DEEP - 64, .isa = isa};
        if (nc_code_product(&of_codes, NULL, 6, (char *const *)tensors))
            return 1;
    }
    return chained_by_all();
}
#elif defined(DEPTHWISE)
static int work_of_all(void)
{
    enum { SIZE = 40, C = 48, PAIRS = 5 };
    void *tensors[] = {calloc(SIZE * SIZE * C, 1), calloc(SIZE * SIZE * C, 1), calloc(C * PAIRS * 2, 2),
        calloc(C, 4), floats(C), floats(C), calloc(C, 1)};
    HOW(nc_depthwise, .threads = TEAM, .outputs = C, .to = DTYPE_U8, .inverse = 1, .images = 1,
        .image = {SIZE, SIZE}, .result = {SIZE, SIZE}, .window = {3, 3}, .steps = {1, 1}, .dilations = {1, 1},
        .pads = {1, 1});
    return CALL(nc_depthwise, tensors);
}
#else
enum { R = 400, N = 512 };

static int norm_by_all(void)
{
    HOW(nc_norm, .to = DTYPE_F32, .of = DTYPE_F32, .rows = R, .width = N, .epsilon = 1e-5, .centred = 1,
        .threads = TEAM);
    void *rows[] = {floats(R * N), floats(R * N), floats(R * N), floats(R * N)};
    return CALL(nc_norm, rows);
}

static int rotary_by_all(void)
{
    HOW(nc_rotary, .to = DTYPE_F32, .half = N / 2, .sizes = {1, 1, R}, .y_strides = {0, 0, N},
        .x_strides = {0, 0, N}, .cosine_strides = {0, 0, N}, .sine_strides = {0, 0, N}, .threads = TEAM);
    void *rows[] = {floats(R * N), floats(R * N), floats(R * N), floats(R * N)};
    return CALL(nc_rotary, rows);
}

static int codes_by_all(void)
{
    HOW(nc_codes, .to = DTYPE_U8, .images = 2, .channels = 3, .pixels = 30000, .inverse = 10, .zero_point = 3,
        .threads = TEAM);
    void *pixels[] = {calloc(180000, 1), floats(180000)};
    return CALL(nc_codes, pixels);
}

static int rounding_by_all(void)
{
    void *tensors[] = {calloc(180000, 1), calloc(2, 4), floats(180000), floats(2 * TEAM)};
    for (int last = 0; last < 2; last++) {
        HOW(nc_round_images, .images = 2, .channels = 3, .pixels = 30000, .channels_last = last,
            .threads = TEAM);
        if (CALL(nc_round_images, tensors))
            return 1;
    }
    return 0;
}

static int attention_by_all(void)
{
    enum { HEADS = 8, KEYS = 600, WIDE = 64 };
    HOW(nc_attention, .batch = 1, .heads = HEADS, .group = 1, .keys = KEYS, .width = WIDE,
        .value_width = WIDE, .q_strides = {0, WIDE}, .k_strides = {0, KEYS * WIDE, WIDE},
        .v_strides = {0, KEYS * WIDE, WIDE}, .y_strides = {0, WIDE}, .factor = 0.1, .threads = TEAM);
    void *heads[] = {
        floats(HEADS * WIDE), floats(HEADS * WIDE), floats(HEADS * KEYS * WIDE), floats(HEADS * KEYS * WIDE)};
    return CALL(nc_attention, heads);
}

static int place_by_all(void)
{
    HOW(nc_place, .bytes = 4 * N, .rows = R, .y_stride = 4 * N, .place_stride = 4 * N, .places = R,
        .threads = TEAM);
    void *rows[] = {floats(R * N), floats(R * N), calloc(R, 8)};
    ((int64_t *)rows[2])[R - 1] = R; /* the last thread finds that it is outside */
    return CALL(nc_place, rows) != OTHER_INDEX;
}

static int work_of_all(void)
{
    return norm_by_all() || rotary_by_all() || codes_by_all() || rounding_by_all() || attention_by_all()
        || place_by_all();
}
#endif

#ifndef NEEDS
#define NEEDS ISA_AVX2
#endif

int main(void)
{
    if (!can_run(NEEDS)) {
        printf(SOURCE ": skipped, this CPU lacks its instructions\n");
        return 0;
    }
    nc_threads((void *)parallel, (void *)my_number, (void *)my_team);
    const int status = work_of_all();
    printf(SOURCE ": %s\n", status ? "a call failed" : "no race");
    return status;
}
