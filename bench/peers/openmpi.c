// SPDX-License-Identifier: Apache-2.0
// Measures MPI's collectives the way `yoke bench comm` measures its own. Build and run:
//   mpicc -O3 -march=native -o peer openmpi.c
//   mpirun -n 2 ./peer --op all_reduce --sizes 64,1048576
//
// Sizes are bytes of float32 as nccl-tests counts them: the buffer for all_reduce, broadcast and
// reduce; the large buffer (all ranks' pieces) for all_gather, reduce_scatter and all_to_all. A
// size that does not divide among the ranks is rounded down to one that does, and bandwidths use
// what was moved. A sample is one call after a barrier, and lasts as long as its slowest rank.
// Results are verified before and after the timing with values that depend on rank and position.
//
// One JSON object for each size on stdout; exit 1 if a result is wrong, 2 for bad arguments. MPI
// calls have no deadline: an alarm ends the process.
//
// Open MPI 4.1 at its best on 2 cores, as measured: in place (1.2 to 2 times faster than into
// another buffer); malloc keeps the scratch memory that every call takes (1.8 times at 64 MB);
// mpirun's own choice of binding, of single copies between processes and of algorithms (no other
// was faster at 1 MB and above, and binding to cores a little slower).
#include <malloc.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { kMaxSizes = 64, kMaxRepeats = 20000, kStartSeconds = 60, kCallSeconds = 60 };
static const char* const kOps[] = {"all_reduce", "all_gather", "reduce_scatter",
                                   "broadcast",  "reduce",     "all_to_all"};
enum Op { kAllReduce, kAllGather, kReduceScatter, kBroadcast, kReduce, kAllToAll, kNumOps };

static int rank, size;

struct Options {
  enum Op op;
  long sizes[kMaxSizes];
  int num_sizes;
  int repeats;  // 0: as many as fill seconds_per_size
  double seconds_per_size;
};

// In place operations have input == output. total and piece count elements.
struct Case {
  enum Op op;
  long total, piece;
  float *input, *output;
  long input_count, output_count;
};

static void quit(int code, const char* message, const char* detail) {
  if (rank == 0) fprintf(stderr, "openmpi: %s%s\n", message, detail);
  MPI_Finalize();
  exit(code);
}

static struct Options parse(int argc, char** argv) {
  struct Options options = {kAllReduce, {64, 1 << 20}, 2, 0, 1.0};
  for (int i = 1; i < argc; i += 2) {
    const char* value = i + 1 < argc ? argv[i + 1] : NULL;
    if (!value) quit(2, "no value after ", argv[i]);
    if (!strcmp(argv[i], "--op")) {
      int op = 0;
      while (op < kNumOps && strcmp(value, kOps[op])) ++op;
      if (op == kNumOps) quit(2, "unknown --op ", value);
      options.op = (enum Op)op;
    } else if (!strcmp(argv[i], "--ranks")) {
      if (atoi(value) != size)
        quit(2, "mpirun -n started another number of ranks than --ranks ", value);
    } else if (!strcmp(argv[i], "--sizes")) {
      char* end = (char*)value;
      for (options.num_sizes = 0; options.num_sizes < kMaxSizes; ++end) {
        long bytes = strtol(end, &end, 10);
        if (bytes < 4 || (*end && *end != ','))
          quit(2, "--sizes wants bytes, 4 or more, as 64,1048576; got ", value);
        options.sizes[options.num_sizes++] = bytes;
        if (!*end) break;
      }
    } else if (!strcmp(argv[i], "--repeats")) {
      options.repeats = atoi(value);
      if (strcmp(value, "auto") && (options.repeats < 1 || options.repeats > kMaxRepeats))
        quit(2, "--repeats wants auto or 1 to 20000; got ", value);
    } else if (!strcmp(argv[i], "--seconds-per-size")) {
      options.seconds_per_size = atof(value);
      if (options.seconds_per_size <= 0)
        quit(2, "--seconds-per-size wants more than 0; got ", value);
    } else {
      quit(2, "unknown argument ", argv[i]);
    }
  }
  return options;
}

static float* allocate(long count) {
  float* data = NULL;
  if (posix_memalign((void**)&data, 64, (size_t)count * sizeof(float)))
    quit(1, "out of memory", "");
  memset(data, 0, (size_t)count * sizeof(float));
  return data;
}

static struct Case make_case(enum Op op, long bytes) {
  struct Case c = {.op = op};
  int in_pieces = op == kAllGather || op == kReduceScatter || op == kAllToAll;
  c.piece = bytes / 4 / size > 0 ? bytes / 4 / size : 1;
  c.total = in_pieces ? c.piece * size : bytes / 4;
  c.input_count = op == kAllGather ? c.piece : c.total;
  c.output_count = op == kReduceScatter ? c.piece : c.total;
  c.output = allocate(c.output_count);
  if (op == kAllGather)
    c.input = c.output + rank * c.piece;  // in its place among the results
  else
    c.input = in_pieces ? allocate(c.input_count) : c.output;
  return c;
}

static void call(struct Case* c) {
  switch (c->op) {
    case kAllReduce:
      MPI_Allreduce(MPI_IN_PLACE, c->input, (int)c->total, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
      break;
    case kAllGather:
      MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, c->output, (int)c->piece, MPI_FLOAT,
                    MPI_COMM_WORLD);
      break;
    case kReduceScatter:
      MPI_Reduce_scatter_block(c->input, c->output, (int)c->piece, MPI_FLOAT, MPI_SUM,
                               MPI_COMM_WORLD);
      break;
    case kBroadcast:
      MPI_Bcast(c->input, (int)c->total, MPI_FLOAT, 0, MPI_COMM_WORLD);
      break;
    case kReduce:
      MPI_Reduce(rank == 0 ? MPI_IN_PLACE : c->input, c->input, (int)c->total, MPI_FLOAT, MPI_SUM,
                 0, MPI_COMM_WORLD);
      break;
    default:
      MPI_Alltoall(c->input, (int)c->piece, MPI_FLOAT, c->output, (int)c->piece, MPI_FLOAT,
                   MPI_COMM_WORLD);
  }
}

// Small whole numbers, so that float32 sums are exact.
static float value_of(int of_rank, long index) { return (float)(index % 13 + 16 * (of_rank + 1)); }

static float expected(const struct Case* c, long i) {
  float sum = 0;
  switch (c->op) {
    case kBroadcast:
      return value_of(0, i);
    case kAllGather:
      return value_of((int)(i / c->piece), i % c->piece);
    case kAllToAll:
      return value_of((int)(i / c->piece), rank * c->piece + i % c->piece);
    case kReduceScatter:
      for (int r = 0; r < size; ++r) sum += value_of(r, rank * c->piece + i);
      return sum;
    default:
      for (int r = 0; r < size; ++r) sum += value_of(r, i);
      return sum;
  }
}

static int verify(struct Case* c) {
  for (long i = 0; i < c->input_count; ++i) c->input[i] = value_of(rank, i);
  call(c);
  int right = 1;
  if (c->op != kReduce || rank == 0)  // reduce promises a result at the root only
    for (long i = 0; i < c->output_count; ++i) right = right && c->output[i] == expected(c, i);
  memset(c->input, 0,
         (size_t)c->input_count * sizeof(float));  // repeated sums in place stay finite
  MPI_Allreduce(MPI_IN_PLACE, &right, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  return right;
}

static double sample(struct Case* c) {
  MPI_Barrier(MPI_COMM_WORLD);
  double start = MPI_Wtime();
  call(c);
  return MPI_Wtime() - start;
}

// Fills times with so many samples or, if that is 0, with as many as the time allows; ranks agree
// on the end.
static int collect(struct Case* c, double* times, int wanted, double seconds) {
  double start = MPI_Wtime();
  for (int count = 0;;) {
    for (int i = 0; i < 10 && (wanted == 0 || count < wanted); ++i) times[count++] = sample(c);
    int done = wanted ? count == wanted : count == kMaxRepeats || MPI_Wtime() - start > seconds;
    MPI_Bcast(&done, 1, MPI_INT, 0, MPI_COMM_WORLD);
    if (done) return count;
  }
}

static int by_value(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

static double bus_factor(enum Op op) {
  if (op == kBroadcast || op == kReduce) return 1.0;
  return (op == kAllReduce ? 2.0 : 1.0) * (size - 1) / size;
}

static int measure(const struct Options* options, long bytes) {
  static double times[kMaxRepeats];
  struct Case c = make_case(options->op, bytes);
  int right = verify(&c);
  collect(&c, times, options->repeats / 10, options->seconds_per_size / 10);  // warm-up
  int repeats = collect(&c, times, options->repeats, options->seconds_per_size);
  right = verify(&c) && right;
  MPI_Allreduce(MPI_IN_PLACE, times, repeats, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  if (rank == 0) {
    qsort(times, (size_t)repeats, sizeof(double), by_value);
    double low = times[repeats / 10], median = times[repeats / 2], high = times[repeats * 9 / 10];
    double alg_gbps = (double)c.total * 4 / median / 1e9;
    printf(
        "{\"backend\": \"openmpi\", \"op\": \"%s\", \"ranks\": %d, \"bytes\": %ld, \"median_us\": "
        "%.3f, "
        "\"p10_us\": %.3f, \"p90_us\": %.3f, \"alg_gbps\": %.4f, \"bus_gbps\": %.4f, \"repeats\": "
        "%d, "
        "\"verified\": %s}\n",
        kOps[c.op], size, bytes, median * 1e6, low * 1e6, high * 1e6, alg_gbps,
        alg_gbps * bus_factor(c.op), repeats, right ? "true" : "false");
    fflush(stdout);
  }
  if (c.op != kAllGather && c.input != c.output) free(c.input);
  free(c.output);
  return right;
}

int main(int argc, char** argv) {
  alarm(kStartSeconds);
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);
  mallopt(M_TOP_PAD, 64 << 20);
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  struct Options options = parse(argc, argv);
  int right = 1;
  for (int i = 0; i < options.num_sizes && right; ++i) {
    alarm(kCallSeconds + (unsigned)(10 * options.seconds_per_size));
    right = measure(&options, options.sizes[i]);
  }
  if (!right) quit(1, "a result was wrong", "");
  MPI_Finalize();
  return 0;
}
