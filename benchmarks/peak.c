/* How many multiply-adds a core does in a second at best: products of registers alone, no memory.
 *
 * nc_peak(kind) returns the rate of the fastest of some hundred short loops, 0 where the compiler does not
 * know the instructions. The caller asks the CPU whether it has them. peak.py calls it from several threads at
 * once.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LOOPS = 300, TIMES = 4000 };

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Multiply-adds of one run of `body`, TIMES times in each loop. */
#define BEST(products, body)                                            \
    do {                                                                \
        double least = 1e9;                                             \
        for (int loop = 0; loop < LOOPS; loop++) {                      \
            const double begin = seconds();                             \
            for (int i = 0; i < TIMES; i++)                             \
                body;                                                   \
            const double taken = seconds() - begin;                     \
            least = taken < least ? taken : least;                      \
        }                                                               \
        return (double)(products) * TIMES / least;                      \
    } while (0)

#define CLOBBERS                                                                                          \
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",     \
        "xmm12", "xmm13", "xmm14", "xmm15"
/* Twelve sums, so that no instruction waits for the one before. */
#define TWELVE(one) one(0) one(1) one(2) one(3) one(4) one(5) one(6) one(7) one(8) one(9) one(10) one(11)

/* All bytes of both factors; no instruction takes another time for other numbers. */
#define ONES "vpcmpeqd %%xmm12, %%xmm12, %%xmm12\n vpsrlw $15, %%xmm12, %%xmm12\n"

#define VNNI_512(n) "vpdpbusd %%zmm12, %%zmm12, %%zmm" #n "\n"
#define VNNI_256(n) "%{vex%} vpdpbusd %%ymm12, %%ymm12, %%ymm" #n "\n"
#define BF16_512(n) "vdpbf16ps %%zmm12, %%zmm12, %%zmm" #n "\n"
#define FMA_256(n) "vfmadd231ps %%ymm12, %%ymm12, %%ymm" #n "\n"
#define FMA_512(n) "vfmadd231ps %%zmm12, %%zmm12, %%zmm" #n "\n"
/* Pairs of products in 16 bits, and their sums. */
#define PAIRS_256(n)                                  \
    "vpmaddubsw %%ymm12, %%ymm12, %%ymm13\n"          \
    "vpmaddwd %%ymm12, %%ymm13, %%ymm13\n"            \
    "vpaddd %%ymm13, %%ymm" #n ", %%ymm" #n "\n"

#define VECTORS(name, products, one)                                                          \
    static double name(void)                                                                  \
    {                                                                                         \
        __asm__ volatile(ONES TWELVE(CLEAR)::: CLOBBERS);                                     \
        BEST(12 * (products), __asm__ volatile(TWELVE(one)::: CLOBBERS));                     \
    }
#define CLEAR(n) "vpxor %%xmm" #n ", %%xmm" #n ", %%xmm" #n "\n"

#if defined(KIND_AVX2)
VECTORS(peak, 32, PAIRS_256)
#elif defined(KIND_AVX_VNNI)
VECTORS(peak, 32, VNNI_256)
#elif defined(KIND_AVX512_VNNI)
VECTORS(peak, 64, VNNI_512)
#elif defined(KIND_AVX512_BF16)
VECTORS(peak, 32, BF16_512)
#elif defined(KIND_FMA)
VECTORS(peak, 8, FMA_256)
#elif defined(KIND_FMA_512)
VECTORS(peak, 16, FMA_512)
#elif defined(KIND_AMX_INT8) || defined(KIND_AMX_BF16)
#ifdef KIND_AMX_INT8
#define PRODUCT "tdpbssd"
enum { PRODUCTS = 16 * 16 * 64 };
#else
#define PRODUCT "tdpbf16ps"
enum { PRODUCTS = 16 * 16 * 32 };
#endif
static double peak(void)
{
    struct {
        uint8_t palette, row, rest[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    if (syscall(SYS_arch_prctl, 0x1023, 18)) /* the operating system lends tiles */
        return 0;
    for (int i = 0; i < 8; i++) {
        shape.bytes[i] = 64;
        shape.rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
    BEST(4 * PRODUCTS, __asm__ volatile(PRODUCT " %%tmm6, %%tmm4, %%tmm0\n" PRODUCT
        " %%tmm7, %%tmm4, %%tmm1\n" PRODUCT " %%tmm6, %%tmm5, %%tmm2\n" PRODUCT " %%tmm7, %%tmm5, %%tmm3\n" ::));
}
#endif

double nc_peak(void) { return peak(); }
