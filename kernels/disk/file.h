// One open file, and how one block of it is moved: whole pages directly, past the page cache; smaller parts
// as [Note: parts of a page] says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace dslaunch::disk {

// [Note: parts of a page]
// Direct I/O moves whole pages to and from aligned memory only. A thread therefore has a bounce buffer: pages
// are read into it whole, and the part that was asked for is copied out.
// A write of a part of a page must leave its other bytes alone. Reading the page and writing it back would
// lose what another thread writes there in between. So
//   - a write that ends where the file's contents end is padded with zeros to the end of its page, which the
//     preallocated file has for this;
//   - any other part goes through the page cache (the second descriptor), where the kernel merges the bytes.
// A page is at least `page_bytes` here, the kernel's own: one page is never dirty in the cache while a
// neighbour request writes it directly, and two requests that share no byte may run at the same time.

// Conditions of the file system for direct I/O, and the end of the contents.
struct Layout {
    std::int64_t nbytes;        // length of the contents
    std::int64_t padded_bytes;  // length of the file: all of it may be written
    std::int64_t page_bytes;    // divides file offsets and lengths; a power of two
    std::int64_t memory_align;  // divides addresses; a power of two
};

// Reason why a block stopped: 0, or an errno, or `file_ended`; and the byte of the file where it happened.
struct Failure {
    int error = 0;
    std::int64_t offset = 0;
};
constexpr int file_ended = -1;

// Page-aligned memory that grows to the largest block asked for.
class BounceBuffer {
  public:
    BounceBuffer() = default;
    BounceBuffer(const BounceBuffer&) = delete;
    BounceBuffer& operator=(const BounceBuffer&) = delete;
    ~BounceBuffer();

    char* reserve(std::int64_t bytes, std::int64_t align);  // nullptr: no memory

  private:
    char* data_ = nullptr;
    std::int64_t bytes_ = 0;
    std::int64_t align_ = 0;
};

// Owns its descriptors. `direct_fd` is -1 where the file system has no direct I/O.
class File {
  public:
    File(int buffered_fd, int direct_fd, Layout layout);
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File();

    const Layout& layout() const { return layout_; }

    Failure read(char* data, std::int64_t offset, std::int64_t bytes, BounceBuffer& bounce) const;
    Failure write(const char* data, std::int64_t offset, std::int64_t bytes, BounceBuffer& bounce) const;

  private:
    bool is_aligned(const void* data) const;
    Failure write_pages(const char* data, std::int64_t offset, std::int64_t bytes, std::int64_t data_bytes,
                        BounceBuffer& bounce) const;
    Failure write_part(const char* data, std::int64_t offset, std::int64_t bytes) const;

    int buffered_fd_;
    int direct_fd_;
    Layout layout_;
};

// Alignment for direct I/O on this descriptor, as statx tells it (Linux 6.1); zeros where it does not.
struct DirectAlign {
    std::int64_t memory = 0;
    std::int64_t offset = 0;
    bool is_known = false;  // statx answered; zeros then mean that there is no direct I/O
};
DirectAlign direct_align(int fd);

// The file system's name where it is a known one, else the number that statfs gives for its type.
std::string file_system(int fd);

// 0 if one page can be read directly, else the errno. Some file systems take O_DIRECT at open
// and refuse it here.
int probe_direct_read(int fd, std::int64_t page_bytes, std::int64_t memory_align);

}  // namespace dslaunch::disk
