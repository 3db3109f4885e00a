// Runs hopper.cu on the CPU, one cluster after the other. Reads and writes raw tensors in the folder given.
#include <string>

#include "cpu_ptx.h"
#include "kernel.inc" // hopper.cu without its include of ptx.cuh

static std::vector<u8> read_file(const std::string& name) {
  FILE* f = std::fopen(name.c_str(), "rb");
  if (!f) std::exit(6);
  std::fseek(f, 0, SEEK_END);
  const long size = std::ftell(f);
  std::rewind(f);
  std::vector<u8> r(size);
  if (std::fread(r.data(), 1, size, f) != (size_t)size) std::exit(6);
  std::fclose(f);
  return r;
}

// Copied to a 16-byte boundary plus `shift`, with room for copies that are cut at 16 bytes.
static u8* place(std::vector<u8>& room, const std::vector<u8>& data, u32 shift) {
  room.assign(data.size() + 64 + shift, 0xFF);
  u8* p = (u8*)(((u64)room.data() + 31) / 16 * 16) + shift;
  std::memcpy(p, data.data(), data.size());
  inputs.push_back({(u8*)((u64)p / 16 * 16), (u8*)(((u64)p + data.size() + 15) / 16 * 16)});
  return p;
}

// Elements before and behind each buffer that the kernel writes: NaN, as its content is at first.
constexpr size_t GUARD = 256;
template <class T> struct Guarded {
  std::vector<u8> room;
  size_t bytes;
  explicit Guarded(size_t count) : room((count + 2 * GUARD) * sizeof(T) + 16, 0xFF), bytes(count * sizeof(T)) {}
  T* data() { return (T*)(((u64)room.data() + 15) / 16 * 16) + GUARD; }
  bool intact() {
    u8 *begin = (u8*)data(), *end = begin + bytes;
    for (u8& x : room) {
      if ((&x < begin || &x >= end) && x != 0xFF) return false;
    }
    return true;
  }
};

static Args args;
static void fiber_main() {
  mla_decode_mxfp4(args);
  current->done = true;
  idle_turns = 0;
  swapcontext(&current->context, &scheduler);
}

// folder batch cluster clusters log2_scale launches order: with order 1 the fibers take turns in changing order
// and one warp after the other runs ahead, which shows missing barriers that a fixed order can hide.
int main(int, char** argv) {
  const std::string folder = std::string(argv[1]) + "/";
  const int batch = std::atoi(argv[2]), size = std::atoi(argv[3]), clusters = std::atoi(argv[4]);
  std::vector<u8> q_room, kv_room, scale_room, ptr_room;
  args.q = place(q_room, read_file(folder + "q"), 0);
  args.kv = place(kv_room, read_file(folder + "kv"), 0);
  args.scale = place(scale_room, read_file(folder + "scale"), 2);
  args.kv_indptr = (int*)place(ptr_room, read_file(folder + "indptr"), 0);
  const std::vector<u8> given[] = {q_room, kv_room, scale_room, ptr_room};
  const size_t out_bytes = (size_t)batch * HEADS * LATENT * 2;
  Guarded<u8> out(out_bytes);
  Guarded<float4> parts(2 * clusters * QUADS);
  Guarded<float2> stats(2 * clusters * MAX_CLUSTER * HEADS);
  Guarded<u32> arrivals(batch * MAX_CLUSTER);
  args.out = out.data();
  args.parts = parts.data();
  args.part_stats = stats.data();
  args.arrivals = arrivals.data();
  std::memset(args.arrivals, 0, arrivals.bytes);
  args.log2_scale = std::atof(argv[5]);
  args.batch = batch;
  grid_size = size * clusters;
  const bool order = std::atoi(argv[7]);
  u32 turns = 0;
  std::vector<Fiber> fibers(size * THREADS);
  for (int launch = 0; launch < std::atoi(argv[6]); launch++) {
    std::memset(args.out, 0xFF, out_bytes);
    for (int c = 0; c < clusters; c++) {
      Cluster cluster;
      cluster.barrier.need = size * THREADS;
      for (int r = 0; r < size; r++) {
        auto cta = std::make_unique<Cta>();
        cta->memory.assign(SHARED_BYTES + 1024, 0xFF);
        cta->shared = (u8*)(((u64)cta->memory.data() + 1023) / 1024 * 1024);
        cta->barrier.need = THREADS;
        cta->warps.resize(THREADS / 32);
        for (Warp& w : cta->warps) w.meet.need = 32;
        cta->index = c * size + r;
        cta->rank = r;
        cta->cluster = &cluster;
        cluster.ctas.push_back(std::move(cta));
      }
      for (int i = 0; i < size * THREADS; i++) {
        Fiber& f = fibers[i];
        f.stack.resize(1 << 16);
        f.cta = cluster.ctas[i / THREADS].get();
        f.thread = i % THREADS;
        f.done = false;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = f.stack.size();
        f.context.uc_link = nullptr;
        makecontext(&f.context, fiber_main, 0);
      }
      auto run = [&](Fiber& f) {
        if (f.done) return 0;
        current = &f;
        swapcontext(&scheduler, &f.context);
        return f.done ? 0 : 1;
      };
      for (int running = size * THREADS; running;) {
        running = 0;
        const u32 skip = order ? (turns += 97) % fibers.size() : 0;
        for (size_t i = 0; i < fibers.size(); i++) {
          const size_t at = (i + skip) % fibers.size();
          running += run(fibers[turns % 2 ? fibers.size() - 1 - at : at]);
        }
        if (!order) continue;
        const size_t ahead = turns / 97 % (fibers.size() / 32) * 32; // a warp that runs as far as the others let it
        for (u64 before = progress - 1; before != progress;) {
          before = progress;
          for (size_t i = 0; i < 32; i++) run(fibers[ahead + i]);
        }
      }
    }
  }
  for (int i = 0; i < batch * MAX_CLUSTER; i++) {
    if (args.arrivals[i]) return 7; // a counter that the next launch would find wrong
  }
  if (!out.intact() || !parts.intact() || !stats.intact() || !arrivals.intact()) return 8; // wrote outside its buffers
  if (given[0] != q_room || given[1] != kv_room || given[2] != scale_room || given[3] != ptr_room) return 9;
  FILE* f = std::fopen((folder + "out").c_str(), "wb");
  std::fwrite(args.out, 1, out_bytes, f);
  std::fclose(f);
  return 0;
}
