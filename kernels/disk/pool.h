// Threads that move blocks, and the requests that they are cut from.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "file.h"

namespace dslaunch::disk {

// One array on its way. The memory and the file stay until `is_done`:
// the caller keeps the first, this the second.
class Request {
  public:
    Request(std::shared_ptr<const File> file, bool is_write, char* data, std::int64_t offset, std::int64_t bytes,
            std::int64_t block_bytes);

    bool is_done() const { return is_done_.load(std::memory_order_acquire); }
    bool wait_for(std::chrono::milliseconds time);  // whether it is done
    void wait();
    Failure failure() const { return failure_; }  // once done: of the first block in the file that failed

  private:
    friend class Pool;

    void move_block(std::int64_t begin, BounceBuffer& bounce);
    void finish_block(Failure failure);

    const std::shared_ptr<const File> file_;
    const bool is_write_;
    char* const data_;
    const std::int64_t begin_;  // in the file
    const std::int64_t end_;
    const std::int64_t block_bytes_;
    std::int64_t next_;  // begin of the next block; under the pool's mutex

    std::mutex mutex_;
    std::condition_variable done_;
    std::int64_t num_moving_ = 0;  // blocks that threads have; this and what follows under mutex_
    bool is_all_taken_ = false;
    Failure failure_;
    std::atomic<bool> is_done_{false};
    std::atomic<bool> has_failed_{false};
};

// [Note: the pool after fork]
// A forked child has this object but not its threads, and perhaps its mutex locked by one of them. There
// nothing may be locked or joined: the caller must ask `is_at_home` first, and the state is left behind
// when the object goes.

class Pool {
  public:
    Pool(int num_threads, std::int64_t block_bytes);
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    ~Pool() { close(); }

    bool is_at_home() const;  // whether this is the process that made it
    pid_t home() const { return home_; }

    // nullptr once it is closed.
    std::shared_ptr<Request> submit(std::shared_ptr<const File> file, bool is_write, char* data, std::int64_t offset,
                                    std::int64_t bytes);
    void close();  // waits for every request that was submitted; in a forked child it does nothing

  private:
    struct State {
        std::mutex mutex;
        std::condition_variable work;
        std::deque<std::shared_ptr<Request>> queue;  // requests with blocks that no thread has yet
        std::vector<std::thread> threads;
        bool is_closing = false;
    };

    static void run(State& state);

    const pid_t home_;
    const std::int64_t block_bytes_;
    std::unique_ptr<State> state_;
};

}  // namespace dslaunch::disk
