/* One deflated Hutchinson probe of categorical distributions on a CPU: u = √λ v ξ_1 + (I - vvᵀ) S ξ_2 for each row of
   logits, with p = softmax and the leading eigenpair of diag(p) - ppᵀ.

   As torch's operations do it (core/spectrum.py, Categorical.factor), but in float64 whatever the logits are, in one go
   over a row that stays in the cache.  Only p is rounded to their precision, which decides what is tied, or zero.  So
   the same noise gives the same probe, but for rounding.  With the poles p_a > p_b, the
   two likeliest classes, λ = p_b (1 + x), x + y = gap = p_a/p_b - 1 and W = gap·x/y, a step of the secular equation is

       xL = Σ_{i≠a} r_i/q_i,  s = Σ_{i≠a} r_i/q_i²   with r_i = p_i/p_b, q_i = 1 + (1 - r_i)/x,    t = p_a/p_b
       (t/gap²) W² + (t/gap - s/gap - (xL - s)/x) W - s = 0.

   Rows whose largest probabilities are tied have many leading eigenvectors: they are marked, and left to torch.  So are
   those with NaN or +inf, or without any possible class.

   Compiled when it is first needed (build.py); any C compiler that knows GCC's vector extensions will do. */

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(__AVX512F__)
enum { LANES = 8 };
#elif defined(__AVX__)
enum { LANES = 4 };
#else
enum { LANES = 2 };
#endif
enum { ROWS = 16, STEPS = 40 }; /* rows that a thread takes at a time; steps at most: five are usual */

typedef double vector __attribute__((vector_size(8 * LANES)));
typedef int64_t size;

struct job {
    const void *logits, *noise; /* [N, C] and [N, 1 + C]: ξ_1, then ξ_2 */
    void *u;                    /* [N, C], to be written */
    uint8_t *left;              /* [N], to be written: whether the row has been left out */
    size N, C, wide;            /* wide: numbers are double, else float */
    size next, skipped;         /* row that nobody has begun; how many rows have been left out */
};

static double sum(vector values)
{
    double total = 0;
    for (int i = 0; i < LANES; i++) total += values[i];
    return total;
}

/* λ, and v not yet of length one, for p_a > p_b > 0; r and room are scratch, of a multiple of LANES. */
static double solve(const double *p, size C, size a, double low, vector *r, vector *room, double *v)
{
    const double high = p[a], gap = (high - low) / low, t_gap = high / low / gap;
    const size count = (C + LANES - 1) / LANES;
    for (size i = 0; i < count * LANES; i++) {
        const int other = i < C && i != a;
        ((double *)r)[i] = other ? p[i] / low : 0;
        ((double *)room)[i] = other ? (low - p[i]) / low : 1;
    }
    double W = gap;
    for (int step = 0; step < STEPS; step++) {
        const double z = 1 + W / gap, x = W / z, before = W;
        vector first = {0}, second = {0};
        for (size i = 0; i < count; i++) {
            const vector inverse = x / (x + room[i]), term = r[i] * inverse;
            first += term;
            second += term * inverse;
        }
        const double xL = sum(first), s = sum(second);
        const double linear = t_gap - s / gap - (xL - s) / x;
        const double root = fabs(linear) + sqrt(linear * linear + 4 / gap * s * t_gap);
        W = linear > 0 ? 2 * s / root : root / (2 * t_gap) * gap;
        if (!(fabs(W - before) > 4e-8 * W)) break; /* what is left is about its square */
    }
    const double z = 1 + W / gap, pole = gap >= W ? low : high, offset = gap >= W ? W / z : -gap / z;
    for (size i = 0; i < C; i++) v[i] = p[i] / low / ((p[i] - pole) / low - offset);
    return pole + low * offset;
}

/* The leading eigenpair of one row, v not of length one; below 0 if it is tied. */
static double leading(const double *p, size C, size *likely, vector *r, vector *room, double *v)
{
    size a = 0, zeros = 0;
    for (size i = 1; i < C; i++)
        if (p[i] > p[a]) a = i;
    double low = 0;
    for (size i = 0; i < C; i++) {
        if (i != a && p[i] > low) low = p[i];
        zeros += p[i] == 0;
    }
    *likely = a;
    if (C == 2) {
        v[a] = 1, v[1 - a] = -1;
        return 2 * p[0] * (p[1] / (p[0] + p[1]));
    }
    if (low == 0) { /* λ = 0: constant on the classes that cannot occur, and on the others */
        for (size i = 0; i < C; i++) v[i] = p[i] == 0 ? -(double)(C - zeros) / zeros : 1;
        return 0;
    }
    return low == p[a] ? -1 : solve(p, C, a, low, r, room, v);
}

/* p = softmax(z) of row n; whether it could be had. */
static int softmax(const struct job *job, size n, double *p)
{
    const size C = job->C;
    double most = -INFINITY, total = 0;
    int finite = 1;
    for (size i = 0; i < C; i++) {
        p[i] = job->wide ? ((const double *)job->logits)[n * C + i] : ((const float *)job->logits)[n * C + i];
        finite &= p[i] < INFINITY; /* false for NaN */
        most = p[i] > most ? p[i] : most;
    }
    if (!finite || most == -INFINITY) return 0;
    for (size i = 0; i < C; i++) total += p[i] = exp(p[i] - most);
    for (size i = 0; i < C; i++) p[i] = job->wide ? p[i] / total : (float)(p[i] / total);
    return 1;
}

static double noise_at(const struct job *job, size i)
{
    return job->wide ? ((const double *)job->noise)[i] : ((const float *)job->noise)[i];
}

/* Whether the row could be done. */
static int probe_row(const struct job *job, size n, double *memory)
{
    const size C = job->C, padded = (C + LANES - 1) / LANES * LANES;
    double *r = memory, *room = r + padded, *p = room + padded, *normal = p + padded, *v = normal + padded;
    double *rest = v + padded; /* S ξ_2 */
    const double tiny = job->wide ? DBL_MIN : FLT_MIN; /* smaller numbers have no relative accuracy left */
    if (!softmax(job, n, p)) return 0;
    for (size i = 0; i < C; i++) normal[i] = p[i] < tiny ? 0 : p[i];
    size a;
    const double value = leading(normal, C, &a, (vector *)r, (vector *)room, v);
    if (value < 0) return 0;

    double total = 0, others = 0, along = 0, square = 0;
    for (size i = 0; i < C; i++) total += rest[i] = sqrt(p[i]) * noise_at(job, n * (C + 1) + 1 + i);
    for (size i = 0; i < C; i++) others += rest[i] = i == a ? 0 : rest[i] - p[i] * total;
    rest[a] = -others; /* the entries sum to zero, and nothing cancels */
    for (size i = 0; i < C; i++) {
        along += v[i] * rest[i];
        square += v[i] * v[i];
    }
    along = sqrt(value / square) * noise_at(job, n * (C + 1)) - along / square;
    for (size i = 0; i < C; i++) {
        const double u = rest[i] + along * v[i];
        if (job->wide) ((double *)job->u)[n * C + i] = u;
        else ((float *)job->u)[n * C + i] = (float)u;
    }
    return 1;
}

static void probe_rows(void *given)
{
    struct job *job = given;
    const size padded = (job->C + LANES - 1) / LANES * LANES;
    double *memory = aligned_alloc(64, (6 * padded * sizeof(double) + 63) / 64 * 64);
    if (!memory) return;
    for (;;) {
        const size start = __atomic_fetch_add(&job->next, ROWS, __ATOMIC_RELAXED);
        if (start >= job->N) break;
        for (size n = start; n < start + ROWS && n < job->N; n++) {
            job->left[n] = !probe_row(job, n, memory);
            if (job->left[n]) __atomic_fetch_add(&job->skipped, 1, __ATOMIC_RELAXED);
        }
    }
    free(memory);
}

/* Whether it has been done: there may be no memory.  `parallel` is OpenMP's, of the library that torch has loaded. */
int probe(struct job *job, void (*parallel)(void (*)(void *), void *, unsigned, unsigned), unsigned threads)
{
    job->next = job->skipped = 0;
    if (parallel && threads > 1) parallel(probe_rows, job, threads, 0);
    else probe_rows(job);
    return job->next >= job->N;
}
