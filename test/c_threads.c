/* The parts of the C code that threads share, under the thread sanitizer: `make sanitize` compiles this file once for each source.
 *
 * Threads are those of POSIX, which the sanitizer knows, in the place of OpenMP's, which it does not. What is covered: how a function divides
 * its work (in_parts), what parts write, and the mark that any of them may set. What is not: torch's threads, lists of calls, and what
 * instructions with masks and tiles of AMX read and write, which the compiler does not instrument.
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

static int64_t bits(float x)
{
    int32_t found;
    memcpy(&found, &x, 4);
    return found;
}

#define CALL(function, numbers, tensors) \
    function(numbers, NULL, (int)(sizeof(tensors) / sizeof *(tensors)), (char *const *)(tensors))

#ifdef LOW_BIT
static int work_of_all(void)
{
    enum { N = 512, K = 512, M = 64, GROUP = 64 };
    float *x = floats(M * K), *scale = floats(N * K / GROUP), *offset = floats(N * K / GROUP), *y = floats(M * N), table[16] = {0};
    uint8_t *codes = calloc(N * K, 1);
    for (int isa = 0; isa <= ISA_AMX; isa++)
        for (int64_t block = -1; block <= 32; block += block < 0 ? 1 : 32)
            for (int unfit = 0; unfit < 2; unfit++) {
                const int64_t shape[] = {N, K, K, GROUP, 8, 128, isa, 0};
                x[K / 2] = x[(M - 1) * K] = unfit ? INFINITY : 1; /* in rows of several threads */
                if (!(nc_isas() >> isa & 1) || (isa == ISA_AMX && !nc_low_bit_amx()) || (isa == ISA_AVX_VNNI && !__builtin_cpu_supports("avxvnni")))
                    continue;
                if (nc_low_bit_linear(x, M, K, shape, codes, scale, offset, table, NULL, y, block, TEAM))
                    return 1;
            }
    return 0;
}
#elif defined(LOW_BIT_BLOCKS)
static int work_of_all(void)
{
    enum { N = 512, K = 240, M = 40, ALL = N * (K / 20) };
    float *x = floats(M * K), *scale = floats(ALL), *offset = floats(ALL), *y = floats(M * N), *values = floats(PANEL + N);
    uint8_t *codes = calloc(N * 2 * K, 1);
    const int amx = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) == 0;
    static const int64_t blocks[] = {-2, -1, 0, 32}, isas[] = {ISA_AVX2, ISA_AVX512, ISA_AMX}, most[] = {3, M};
    for (int i = 0; i < 3 * 4 * 2 * 4 * 2 * 2; i++) {
        const int64_t isa = isas[i % 3], block = blocks[i / 3 % 4], rows = most[i / 12 % 2], kind = i / 24 % 4, unfit = i / 96 % 2, group = i / 192 ? 20 : 40;
        const int64_t shape[] = {N, K, K / group, (group + 7) / 8 * 8, kind, 1 + i / 3 % 3, isa, FP32};
        x[K / 2] = x[(rows - 1) * K] = unfit ? INFINITY : 1; /* in rows of several threads */
        if (!(nc_isas() >> isa & 1) || (isa == ISA_AMX && !amx) || (isa == ISA_AVX512 && !__builtin_cpu_supports("avx512bw")))
            continue;
        if (nc_low_bit_blocks_linear(x, rows, K, shape, codes, scale, i % 5 ? offset : NULL, values, i % 2 ? values : NULL, y, block, TEAM))
            return 1;
    }
    return 0;
}
#elif defined(RECURRENT)
static struct matrix matrix(int64_t outputs, int64_t inputs)
{
    const int64_t panels = (outputs + PANEL - 1) / PANEL, words = (inputs + 3) / 4;
    return (struct matrix){outputs, inputs, calloc(panels * words, 4 * PANEL), floats(outputs), calloc(outputs, 4), floats(outputs)};
}

static int work_of_all(void)
{
    enum { STEPS = 12, MOST_ROWS = 11, FEATURES = 40, HIDDEN = 24 };
    static const int64_t gates[] = {4, 3, 1, 1};
    float *x = floats(STEPS * MOST_ROWS * FEATURES), *y = floats(STEPS * MOST_ROWS * HIDDEN), *h = floats(MOST_ROWS * HIDDEN),
          *c = floats(MOST_ROWS * HIDDEN), *of_gates = floats(STEPS * MOST_ROWS * 4 * HIDDEN);
    for (int i = 0; i < 2 * 4 * 2 * 2; i++) {
        const int64_t isa = i % 2 ? ISA_AVX512_VNNI : ISA_AVX2, kind = i / 2 % 4, rows = i / 8 % 2 ? MOST_ROWS : 1;
        const int64_t projected = kind == LSTM && i / 16 ? 8 : 0, state = projected ? projected : HIDDEN, width = gates[kind] * HIDDEN;
        struct layer l = {sizeof l, kind, isa, TEAM, i / 8 % 2, STEPS, rows, HIDDEN, state, rows * FEATURES, FEATURES, rows * state, state,
                          x, y, h, c, of_gates, matrix(width, FEATURES), matrix(width, state), {0}};
        if (projected)
            l.projection = matrix(projected, HIDDEN);
        if (isa == ISA_AVX512_VNNI && !__builtin_cpu_supports("avx512vnni"))
            continue;
        if (nc_recurrent(&l))
            return 1;
        no_memory = 1; /* which each thread says */
        if (nc_recurrent(&l) != NO_MEMORY)
            return 1;
        no_memory = 0;
    }
    return 0;
}
#elif defined(ATTENTION)
static int work_of_all(void)
{
    enum { HEADS_ = 3, ROWS_ = 40, KEYS_ = 64, WIDTH_ = 64 };
    const int64_t each = ROWS_ * WIDTH_, size = KEYS_ * WIDTH_, bytes = 1 << 18;
    int64_t how[1 + OTHERS] = {OTHERS, 1, HEADS_, ROWS_, KEYS_, WIDTH_, WIDTH_, HEADS_ * each, each, WIDTH_, HEADS_ * size, size, WIDTH_,
                               HEADS_ * size, size, WIDTH_, HEADS_ * each, each, WIDTH_, 1, 2, 3, 0, bits(0.001f), bits(255), bits(0.001f), bits(1),
                               0, 2, bytes, TEAM, 0, 0};
    void *tensors[] = {floats(HEADS_ * each), calloc(HEADS_ * each, 1), calloc(HEADS_ * size, 1), calloc(HEADS_ * size, 1), aligned_alloc(64, TEAM * bytes)};
    return CALL(nc_attention, how, tensors);
}
#elif defined(PRODUCTS)
static int work_of_all(void)
{
    enum { M = 200, N = 250, K = 512 };
    const int64_t packing[] = {3, N, K, TEAM};
    void *packed[] = {calloc((N + 7) / 8 * 8 * K, 1), calloc(N * K, 1), calloc(N + 16, 4)};
    const int64_t how[] = {COUNT + 1, TEAM, N, 0, FP32, IDENTITY, 0, 0, 0, 0, 0, 0, K, K, M};
    void *tensors[] = {floats(M * N), calloc(M * K, 1), packed[0], packed[2], floats(N + 16), floats(N + 16)};
    return CALL(nc_product_pack, packing, packed) || CALL(nc_product, how, tensors);
}
#else
static int work_of_all(void)
{
    enum { R = 400, N = 512, HEADS_ = 8, KEYS_ = 600, WIDE_ = 64 };
    const int64_t norm[] = {9, F32, F32, R, N, bits(1e-5f), 1, TEAM, 0, 0}, image[] = {5, 2, 30000, bits(10), 3, TEAM};
    const int64_t rotary[] = {R_SIN + 3, F32, N / 2, 1, 1, R, TEAM, 0, 0, 0, 0, N, 0, 0, N, 0, 0, N, 0, 0, N};
    const int64_t attention[] = {A_THREADS + 1, 1, HEADS_, 1, KEYS_, WIDE_, WIDE_, NO_MASK, F32, F32, F32, F32, F32, 0, WIDE_, 0, KEYS_ * WIDE_, WIDE_,
                                 0, KEYS_ * WIDE_, WIDE_, 0, WIDE_, 0, 0, 0, bits(0.1f), TEAM};
    void *rows[] = {floats(R * N), floats(R * N), floats(R * N), floats(R * N)}, *pixels[] = {calloc(180000, 1), floats(180000)};
    void *heads[] = {floats(HEADS_ * WIDE_), floats(HEADS_ * WIDE_), floats(HEADS_ * KEYS_ * WIDE_), floats(HEADS_ * KEYS_ * WIDE_)};
    return CALL(nc_step_norm, norm, rows) || CALL(nc_step_rotary, rotary, rows) || CALL(nc_step_image, image, pixels) ||
           CALL(nc_step_attention, attention, heads);
}
#endif

int main(void)
{
    nc_threads((void *)parallel, (void *)my_number, (void *)my_team);
    const int status = work_of_all();
    printf(SOURCE ": %s\n", status ? "a call failed" : "no race");
    return status;
}
