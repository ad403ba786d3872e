// Reads random blocks of a file with threads of O_DIRECT preads, as fio's randread does, and prints the seconds.
//
//     random_read FILE BLOCK_BYTES READS THREADS SEED
//
// It knows nothing of speedswap: what it reaches is the disk's own rate for this many reads at a time.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

// SplitMix64: the seed's i-th number.
static uint64_t random_number(uint64_t seed, uint64_t i) {
    uint64_t x = seed + (i + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

int main(int count, char** words) {
    if (count != 6) return fprintf(stderr, "random_read FILE BLOCK_BYTES READS THREADS SEED\n"), 2;
    const size_t block = strtoull(words[2], nullptr, 10);
    const uint64_t reads = strtoull(words[3], nullptr, 10), threads = strtoull(words[4], nullptr, 10);
    const uint64_t seed = strtoull(words[5], nullptr, 10) << 32;
    const int file = open(words[1], O_RDONLY | O_DIRECT);
    if (file < 0) return perror(words[1]), 1;
    struct stat about;
    if (fstat(file, &about)) return perror("fstat"), 1;
    const uint64_t blocks = uint64_t(about.st_size) / block;
    if (!blocks) return fprintf(stderr, "%s has less than one block\n", words[1]), 1;

    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> pool;
    for (uint64_t i = 0; i < threads; ++i) {
        pool.emplace_back([&] {
            void* buffer = nullptr;
            if (posix_memalign(&buffer, 4096, block)) failed = true;
            for (uint64_t read; !failed && (read = next++) < reads;) {
                const off_t offset = off_t(random_number(seed, read) % blocks * block);
                if (pread(file, buffer, block, offset) != ssize_t(block)) failed = true;
            }
            free(buffer);
        });
    }
    for (std::thread& thread : pool) thread.join();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (failed) return perror("pread"), 1;
    printf("%.6f\n", took.count());
    return 0;
}
