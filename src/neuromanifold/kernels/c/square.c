/* Σ_n (Σ_t left[n, t, o] right[n, t, i])² on a CPU: a sample's product stays in registers until it is squared.

       block    some rows o and channels c of the parameter, whose sums stay in the cache while all samples pass
       chunk    positions t of a sample, or of a few: rows of left, and panels of right, packed so as to be read in order
       tile     ROWS x WIDTH numbers in registers: summed over t, then squared and added to the block's sums
       ending   the block's sums are added to the parameter's

   The columns of right are windows of an image: i = (c, k), channel c of what lies at tap k of position t.  A linear
   layer has one tap.  Images that do not have their channels last, or need padding, are copied so, a block's channels
   of one sample at a time.  Blocks are independent of each other, so sums do not depend on the number of threads.

   Compiled when it is first needed (build.py); any C compiler that knows GCC's vector extensions will do. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 8 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 4 };
#elif defined(__aarch64__)
enum { LANES = 4, ROWS = 8 };
#else
enum { LANES = 4, ROWS = 4 };
#endif
enum { WIDTH = 2 * LANES, TILE = ROWS * WIDTH };
enum { CHUNK = 256, TOGETHER = 128 }; /* positions of one sample; of several, where each has few */

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t mask __attribute__((vector_size(4 * LANES)));
typedef int64_t size;

static const float BOUND = 0x1p60f; /* of squares whose squares are summed */

const size rows_of_a_tile = ROWS, width_of_a_tile = WIDTH;

struct job {
    const float *left, *right;
    float *squares, *fourths;                       /* [G, O, C, K]; fourths may be 0 */
    const size *left_at, *right_at, *taps, *source; /* positions of left [T]; of windows [T], taps [K], pixels [P] */
    size N, G, T, O, C, K, P;                       /* samples, groups, positions, and of one group: rows, channels */
    size left_n, left_g, left_o, right_n, right_g, right_c; /* strides */
    size block_o, block_c;
    float factor, square_factor, fourth_factor; /* of left, and of what is added */
    size next;                                  /* block that nobody has begun */
};

static size least(size a, size b) { return a < b ? a : b; }
static size parts(size a, size b) { return (a + b - 1) / b; }

/* A tile of one sample, over some of its positions; `part` holds it where these are not the first, or the last. */
static inline __attribute__((always_inline)) void
multiply(size count, const float *left, const float *right, float *part, float *sums2, float *sums4, int first, int last)
{
    vector sum[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < 2; v++) sum[r][v] = (vector){0}; /* of this chunk: long sums in one go lose accuracy */
    for (size t = 0; t < count; t++, left += ROWS, right += WIDTH) {
        vector low = *(const vector *)right, high = *(const vector *)(right + LANES);
        for (int r = 0; r < ROWS; r++) {
            sum[r][0] += left[r] * low;
            sum[r][1] += left[r] * high;
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < 2; v++) {
            size at = r * WIDTH + v * LANES;
            if (!first) sum[r][v] += *(vector *)(part + at);
            if (!last) {
                *(vector *)(part + at) = sum[r][v];
                continue;
            }
            vector square = sum[r][v] * sum[r][v];
            *(vector *)(sums2 + at) += square;
            if (sums4) {
                const vector bound = (vector){0} + BOUND;
                mask more = square > bound; /* false for NaN, which stays */
                square = (vector)((more & (mask)bound) | (~more & (mask)square));
                *(vector *)(sums4 + at) += square * square;
            }
        }
}

/* The same with constants for what compilers should decide. */
static void whole_tile(size count, const float *left, const float *right, float *sums2, float *sums4)
{
    if (sums4) multiply(count, left, right, 0, sums2, sums4, 1, 1);
    else multiply(count, left, right, 0, sums2, 0, 1, 1);
}

static void part_of_tile(
    size count, const float *left, const float *right, float *part, float *sums2, float *sums4, int first, int last)
{
    if (last) multiply(count, left, right, part, sums2, sums4, 0, 1);
    else if (first) multiply(count, left, right, part, 0, 0, 1, 0);
    else multiply(count, left, right, part, 0, 0, 0, 0);
}

/* left [count, rows] to [panel, count, ROWS], times the factor, with zeros for rows that are not there. */
static void pack_left(const struct job *job, const float *left, const size *at, size rows, size count, float *to)
{
    const size step = job->left_o;
    for (size o = 0; o < rows; o += ROWS, left += ROWS * step, to += count * ROWS) {
        const size many = least(ROWS, rows - o);
        if (many < ROWS) memset(to, 0, sizeof(float) * count * ROWS);
        for (size t = 0; t < count; t++) {
            const float *from = left + at[t];
            if (many == ROWS && step == 1)
                for (size r = 0; r < ROWS; r++) to[t * ROWS + r] = job->factor * from[r];
            else if (many == ROWS)
                for (size r = 0; r < ROWS; r++) to[t * ROWS + r] = job->factor * from[r * step];
            else
                for (size r = 0; r < many; r++) to[t * ROWS + r] = job->factor * from[r * step];
        }
    }
}

/* A sample's image with channels last: [P, channels], zero where a pixel has no source. */
static void arrange(const struct job *job, const float *right, size channels, float *to)
{
    const size step = job->right_c;
    for (size c = 0; c < channels; c += LANES) {
        const size many = least(LANES, channels - c);
        for (size p = 0; p < job->P; p++) {
            float *pixel = to + p * channels + c;
            const float *from = right + c * step + job->source[p];
            if (job->source[p] < 0) memset(pixel, 0, sizeof(float) * many);
            else if (many == LANES)
                for (size i = 0; i < LANES; i++) pixel[i] = from[i * step];
            else
                for (size i = 0; i < many; i++) pixel[i] = from[i * step];
        }
    }
}

/* Columns of a block, which go through the channels first and then through the taps, to a panel [count, WIDTH]. */
static void pack_right(const struct job *job, const float *image, const size *at, size pitch, size column, size columns,
                       size channels, size count, float *to)
{
    if (columns < WIDTH) memset(to, 0, sizeof(float) * count * WIDTH);
    for (size done = 0; done < columns;) {
        const size tap = (column + done) / channels, c = (column + done) % channels;
        const size run = least(columns - done, channels - c);
        const float *from = image + job->taps[tap] * pitch + c;
        if (run == WIDTH)
            for (size t = 0; t < count; t++) memcpy(to + t * WIDTH, from + at[t] * pitch, sizeof(float) * WIDTH);
        else
            for (size t = 0; t < count; t++)
                for (size i = 0; i < run; i++) to[t * WIDTH + done + i] = from[at[t] * pitch + i];
        done += run;
    }
}

/* Sums of a block [panel of columns, panel of rows, ROWS, WIDTH], to rows that lie C·K apart. */
static void add(const struct job *job, const float *sums, float factor, size rows, size channels, float *to)
{
    const size columns = channels * job->K, stride = parts(rows, ROWS) * TILE;
    for (size o = 0; o < rows; o++, to += job->C * job->K) {
        const float *from = sums + o / ROWS * TILE + o % ROWS * WIDTH;
        for (size column = 0; column < columns; column += WIDTH, from += stride) {
            const size many = least(WIDTH, columns - column);
            if (job->K == 1)
                for (size i = 0; i < many; i++) to[column + i] += factor * from[i];
            else for (size i = 0, c = column % channels, k = column / channels; i < many; i++) {
                to[c * job->K + k] += factor * from[i];
                if (++c == channels) c = 0, k++;
            }
        }
    }
}

struct memory {
    float *sums2, *sums4, *part, *left, *right, *image;
};

/* For blocks, and chunks of some samples; 0 if there is no memory. */
static float *reserve(const struct job *job, struct memory *of, size some)
{
    const size chunk = least(job->T, CHUNK), rows = parts(job->block_o, ROWS) * ROWS;
    const size block = rows * parts(job->block_c * job->K, WIDTH) * WIDTH;
    const size lengths[] = {
        block, job->fourths ? block : 0, job->T > chunk ? block : 0, some * chunk * rows, some * chunk * WIDTH,
        job->source ? some * job->P * job->block_c : 0,
    };
    float **places[] = {&of->sums2, &of->sums4, &of->part, &of->left, &of->right, &of->image};
    size total = 0;
    for (int i = 0; i < 6; i++) total += parts(lengths[i], 16) * 16;
    float *all = aligned_alloc(64, sizeof(float) * total), *at = all;
    for (int i = 0; i < 6; at += parts(lengths[i], 16) * 16, i++) *places[i] = lengths[i] ? at : 0;
    return all;
}

/* Some samples of a block, one after the other for each tile; left and right begin where the block does. */
static void add_samples(const struct job *job, const struct memory *of, const float *left, const float *right,
                        size samples, size rows, size channels)
{
    const size columns = channels * job->K, pitch = job->source ? channels : 1;
    const size right_n = job->source ? job->P * channels : job->right_n;
    for (size n = 0; job->source && n < samples; n++)
        arrange(job, right + n * job->right_n, channels, of->image + n * right_n);
    if (job->source) right = of->image;
    for (size t = 0; t < job->T; t += CHUNK) {
        const size count = least(CHUNK, job->T - t), stored = parts(rows, ROWS) * ROWS * count;
        for (size n = 0; n < samples; n++)
            pack_left(job, left + n * job->left_n, job->left_at + t, rows, count, of->left + n * stored);
        for (size column = 0, at = 0; column < columns; column += WIDTH) {
            for (size n = 0; n < samples; n++)
                pack_right(job, right + n * right_n, job->right_at + t, pitch, column, least(WIDTH, columns - column),
                           channels, count, of->right + n * count * WIDTH);
            for (size o = 0; o < rows; o += ROWS, at += TILE) {
                float *sums2 = of->sums2 + at, *sums4 = of->sums4 ? of->sums4 + at : 0;
                for (size n = 0; n < samples; n++) {
                    const float *a = of->left + n * stored + o * count, *b = of->right + n * count * WIDTH;
                    if (of->part) part_of_tile(count, a, b, of->part + at, sums2, sums4, !t, t + count == job->T);
                    else whole_tile(count, a, b, sums2, sums4);
                }
            }
        }
    }
}

static void add_blocks(void *given)
{
    struct job *job = given;
    struct memory of;
    const size blocks_o = parts(job->O, job->block_o), blocks_c = parts(job->C, job->block_c);
    const size some = job->T < TOGETHER ? least(job->N, TOGETHER / job->T) : 1;
    float *memory = reserve(job, &of, some);
    if (!memory) return;
    for (;;) {
        const size block = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        const size g = block / (blocks_o * blocks_c);
        if (g >= job->G) break;
        const size o = block / blocks_c % blocks_o * job->block_o, c = block % blocks_c * job->block_c;
        const size rows = least(job->block_o, job->O - o), channels = least(job->block_c, job->C - c);
        const size used = parts(rows, ROWS) * ROWS * parts(channels * job->K, WIDTH) * WIDTH;
        memset(of.sums2, 0, sizeof(float) * used);
        if (of.sums4) memset(of.sums4, 0, sizeof(float) * used);
        const float *left = job->left + g * job->left_g + o * job->left_o;
        const float *right = job->right + g * job->right_g + c * job->right_c;
        for (size n = 0; n < job->N; n += some)
            add_samples(job, &of, left + n * job->left_n, right + n * job->right_n, least(some, job->N - n), rows,
                        channels);
        const size at = ((g * job->O + o) * job->C + c) * job->K;
        add(job, of.sums2, job->square_factor, rows, channels, job->squares + at);
        if (of.sums4) add(job, of.sums4, job->fourth_factor, rows, channels, job->fourths + at);
    }
    free(memory);
}

/* Whether it has been done: there may be no memory.  `parallel` is OpenMP's, of the library that torch has loaded. */
int add_squares(struct job *job, void (*parallel)(void (*)(void *), void *, unsigned, unsigned), unsigned threads)
{
    job->next = 0;
    if (parallel && threads > 1) parallel(add_blocks, job, threads, 0);
    else add_blocks(job);
    return job->next > 0;
}
