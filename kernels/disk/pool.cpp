#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace dslaunch::disk {

Request::Request(std::shared_ptr<const File> file, bool is_write, char* data, std::int64_t offset, std::int64_t bytes,
                 std::int64_t block_bytes)
    : file_(std::move(file)),
      is_write_(is_write),
      data_(data),
      begin_(offset),
      end_(offset + bytes),
      block_bytes_(std::max(block_bytes, file_->layout().page_bytes)),
      next_(offset),
      is_done_(bytes == 0) {}

bool Request::wait_for(std::chrono::milliseconds time) {
    if (is_done()) return true;
    std::unique_lock<std::mutex> lock(mutex_);
    return done_.wait_for(lock, time, [this] { return is_done(); });
}

void Request::wait() {
    if (is_done()) return;
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return is_done(); });
}

// Blocks end at multiples of block_bytes in the file, so all but the first and the last are whole pages.
void Request::move_block(std::int64_t begin, BounceBuffer& bounce) {
    const std::int64_t end = std::min(end_, (begin / block_bytes_ + 1) * block_bytes_);
    char* data = data_ + (begin - begin_);
    // Also if a later block has failed meanwhile: the failure that is told is the first one in the file.
    finish_block(is_write_ ? file_->write(data, begin, end - begin, bounce)
                           : file_->read(data, begin, end - begin, bounce));
}

void Request::finish_block(Failure failure) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure.error != 0) {
        if (failure_.error == 0 || failure.offset < failure_.offset) failure_ = failure;
        has_failed_.store(true, std::memory_order_relaxed);
    }
    --num_moving_;
    if (is_all_taken_ && num_moving_ == 0) {
        is_done_.store(true, std::memory_order_release);
        done_.notify_all();
    }
}

Pool::Pool(int num_threads, std::int64_t block_bytes)
    : home_(getpid()), block_bytes_(block_bytes), state_(std::make_unique<State>()) {
    // Signals are for the threads that the program made: one delivered here would only interrupt a transfer.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        state_->threads.reserve(static_cast<std::size_t>(num_threads));
        for (int i = 0; i < num_threads; ++i) state_->threads.emplace_back([state = state_.get()] { run(*state); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        close();
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

bool Pool::is_at_home() const { return getpid() == home_; }

std::shared_ptr<Request> Pool::submit(std::shared_ptr<const File> file, bool is_write, char* data,
                                      std::int64_t offset, std::int64_t bytes) {
    auto request = std::make_shared<Request>(std::move(file), is_write, data, offset, bytes, block_bytes_);
    {
        const std::lock_guard<std::mutex> lock(state_->mutex);
        if (state_->is_closing) return nullptr;
        if (bytes > 0) state_->queue.push_back(request);
    }
    state_->work.notify_all();
    return request;
}

void Pool::run(State& state) {
    BounceBuffer bounce;
    std::unique_lock<std::mutex> lock(state.mutex);
    for (;;) {
        state.work.wait(lock, [&] { return state.is_closing || !state.queue.empty(); });
        if (state.queue.empty()) return;
        const std::shared_ptr<Request> request = state.queue.front();
        const std::int64_t begin = request->next_;
        request->next_ = (begin / request->block_bytes_ + 1) * request->block_bytes_;
        if (request->has_failed_.load(std::memory_order_relaxed)) request->next_ = request->end_;
        const bool is_last = request->next_ >= request->end_;
        if (is_last) state.queue.pop_front();
        {
            const std::lock_guard<std::mutex> taken(request->mutex_);
            ++request->num_moving_;
            request->is_all_taken_ = is_last;
        }
        lock.unlock();
        request->move_block(begin, bounce);
        lock.lock();
    }
}

void Pool::close() {
    if (!is_at_home()) {  // See [Note: the pool after fork].
        (void)state_.release();
        return;
    }
    {
        const std::lock_guard<std::mutex> lock(state_->mutex);
        state_->is_closing = true;
    }
    state_->work.notify_all();
    for (std::thread& thread : state_->threads) {
        if (thread.joinable()) thread.join();
    }
    state_->threads.clear();
}

}  // namespace dslaunch::disk
