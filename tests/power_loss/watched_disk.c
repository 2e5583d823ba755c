/* Stands between a process and its files, for tests; loaded with LD_PRELOAD.

   WATCHED_FOLDER   files below it are watched, others pass untouched
   WATCHED_JOURNAL  every change of a watched file, of names in the folder, every flush, and all that is sent over a
                    socket is appended to this file, in the order in which it happened; `journal.py` reads it
   WATCHED_FULL     while this file exists, the folder is on a full disk: creating and writing fail with ENOSPC

   One lock is held over a change and its record, so the journal's order is the disk's. A flush is recorded when it is
   done, and bytes for a socket before they leave: whatever a client can have heard stands in the journal after all that
   was flushed before. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, TRUNCATE, FLUSH, FLUSH_FOLDER, RENAME, UNLINK, LINK, MAKE_FOLDER, SEND };

struct head {
  uint32_t kind, first_bytes, second_bytes, unused;
  uint64_t inode;
  int64_t offset;
  uint64_t data_bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *folder, *full;
static size_t folder_bytes;
static int journal = -1;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("WATCHED_JOURNAL");
  folder = getenv("WATCHED_FOLDER");
  full = getenv("WATCHED_FULL");
  folder_bytes = folder ? strlen(folder) : 0;
  if (path) journal = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static void put(uint32_t kind, uint64_t inode, int64_t offset, const char *first, const char *second,
                const struct iovec *data, int parts, size_t data_bytes) {
  if (journal < 0) return;
  int saved = errno;
  struct head head = {kind, first ? strlen(first) : 0, second ? strlen(second) : 0, 0, inode, offset, data_bytes};
  struct iovec all[3 + 64] = {{&head, sizeof head}, {(void *)first, head.first_bytes}, {(void *)second, head.second_bytes}};
  int count = 3;
  for (int i = 0; i < parts && i < 64 && data_bytes; i++) {
    size_t take = data[i].iov_len < data_bytes ? data[i].iov_len : data_bytes;
    all[count++] = (struct iovec){data[i].iov_base, take};
    data_bytes -= take;
  }
  /* A record that is cut short would make nonsense of all after it. */
  if (data_bytes || syscall(SYS_writev, journal, all, count) < 0) abort();
  errno = saved;
}

/* The path with the folder it is relative to; an empty one if it is not below the watched folder. */
static int below(int at, const char *path, char *whole) {
  whole[0] = 0;
  if (!folder || !path) return 0;
  if (path[0] == '/') {
    snprintf(whole, PATH_MAX, "%s", path);
  } else {
    char base[PATH_MAX], link[64];
    if (at == AT_FDCWD) {
      if (!getcwd(base, sizeof base)) return 0;
    } else {
      snprintf(link, sizeof link, "/proc/self/fd/%d", at);
      ssize_t n = readlink(link, base, sizeof base - 1);
      if (n < 0) return 0;
      base[n] = 0;
    }
    if (snprintf(whole, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
  }
  return !strncmp(whole, folder, folder_bytes) && (whole[folder_bytes] == '/' || !whole[folder_bytes]);
}

static int is_full(void) {
  return full && !syscall(SYS_faccessat, AT_FDCWD, full, F_OK);
}

static int fail(void) {
  errno = ENOSPC;
  return -1;
}

/* Files are told by their descriptor's path: descriptors are also made by calls that are not watched. */
static int watched(int file, struct stat *facts, char *path) {
  char link[64];
  if (!folder) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t n = readlink(link, path, PATH_MAX - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return !strncmp(path, folder, folder_bytes) && (path[folder_bytes] == '/' || !path[folder_bytes]) && !fstat(file, facts);
}

static int opened(int at, const char *path, int flags, mode_t mode) {
  char whole[PATH_MAX];
  struct stat facts;
  if (!(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE || !below(at, path, whole))
    return syscall(SYS_openat, at, path, flags, mode);
  pthread_mutex_lock(&lock);
  int was_there = !stat(whole, &facts);
  if (!was_there && is_full()) {
    pthread_mutex_unlock(&lock);
    return fail();
  }
  int file = syscall(SYS_openat, at, path, flags, mode);
  if (file >= 0 && !fstat(file, &facts)) {
    if (!was_there) put(CREATE, facts.st_ino, 0, whole, NULL, NULL, 0, 0);
    else if (flags & O_TRUNC) put(TRUNCATE, facts.st_ino, 0, NULL, NULL, NULL, 0, 0);
  }
  pthread_mutex_unlock(&lock);
  return file;
}

#define MODE(flags, last)                      \
  mode_t mode = 0;                             \
  if ((flags) & (O_CREAT | O_TMPFILE)) {       \
    va_list more;                              \
    va_start(more, last);                      \
    mode = va_arg(more, mode_t);               \
    va_end(more);                              \
  }

int open(const char *path, int flags, ...) { MODE(flags, flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags, flags) return opened(AT_FDCWD, path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags, flags) return opened(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags, flags) return opened(at, path, flags, mode); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static size_t length(const struct iovec *parts, int count) {
  size_t bytes = 0;
  for (int i = 0; i < count; i++) bytes += parts[i].iov_len;
  return bytes;
}

/* Bytes to a file; at < 0: where its offset is. */
static ssize_t written(int file, const struct iovec *parts, int count, int64_t at) {
  struct stat facts;
  char path[PATH_MAX];
  int is_watched = watched(file, &facts, path) && S_ISREG(facts.st_mode);
  if (!is_watched)
    return at < 0 ? syscall(SYS_writev, file, parts, count) : syscall(SYS_pwritev, file, parts, count, at, 0);
  if (is_full()) return fail();
  pthread_mutex_lock(&lock);
  ssize_t done = at < 0 ? syscall(SYS_writev, file, parts, count) : syscall(SYS_pwritev, file, parts, count, at, 0);
  if (done > 0) {
    int64_t start = at < 0 ? lseek(file, 0, SEEK_CUR) - done : at;
    put(WRITE, facts.st_ino, start, NULL, NULL, parts, count, done);
  }
  pthread_mutex_unlock(&lock);
  return done;
}

ssize_t write(int file, const void *data, size_t bytes) {
  struct iovec part = {(void *)data, bytes};
  return written(file, &part, 1, -1);
}
ssize_t pwrite(int file, const void *data, size_t bytes, off_t at) {
  struct iovec part = {(void *)data, bytes};
  return written(file, &part, 1, at);
}
ssize_t pwrite64(int file, const void *data, size_t bytes, off64_t at) {
  struct iovec part = {(void *)data, bytes};
  return written(file, &part, 1, at);
}
ssize_t writev(int file, const struct iovec *parts, int count) { return written(file, parts, count, -1); }

static int resized(int file, int64_t bytes) {
  struct stat facts;
  char path[PATH_MAX];
  int is_watched = watched(file, &facts, path);
  if (is_watched && bytes > facts.st_size && is_full()) return fail();
  pthread_mutex_lock(&lock);
  int done = syscall(SYS_ftruncate, file, bytes);
  if (!done && is_watched) put(TRUNCATE, facts.st_ino, bytes, NULL, NULL, NULL, 0, 0);
  pthread_mutex_unlock(&lock);
  return done;
}
int ftruncate(int file, off_t bytes) { return resized(file, bytes); }
int ftruncate64(int file, off64_t bytes) { return resized(file, bytes); }

int truncate(const char *path, off_t bytes) {
  int file = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC, 0);
  if (file < 0) return -1;
  int done = resized(file, bytes), saved = errno;
  syscall(SYS_close, file);
  errno = saved;
  return done;
}
int truncate64(const char *path, off64_t bytes) { return truncate(path, bytes); }

static int flushed(long call, int file) {
  struct stat facts;
  char path[PATH_MAX];
  int is_watched = watched(file, &facts, path);
  /* The record says what was written before the flush began; others may write while it goes on. */
  if (!is_watched) return syscall(call, file);
  pthread_mutex_lock(&lock);
  int done = syscall(call, file);
  if (!done && S_ISDIR(facts.st_mode)) put(FLUSH_FOLDER, facts.st_ino, 0, path, NULL, NULL, 0, 0);
  if (!done && S_ISREG(facts.st_mode)) put(FLUSH, facts.st_ino, 0, NULL, NULL, NULL, 0, 0);
  pthread_mutex_unlock(&lock);
  return done;
}
int fsync(int file) { return flushed(SYS_fsync, file); }
int fdatasync(int file) { return flushed(SYS_fdatasync, file); }

static int named(uint32_t kind, long result, const char *first, const char *second, int first_in, int second_in) {
  if (!result && (first_in || second_in)) put(kind, 0, 0, first, second, NULL, 0, 0);
  pthread_mutex_unlock(&lock);
  return result;
}

int renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
  char first[PATH_MAX], second[PATH_MAX];
  int first_in = below(from_at, from, first), second_in = below(to_at, to, second);
  pthread_mutex_lock(&lock);
  return named(RENAME, syscall(SYS_renameat2, from_at, from, to_at, to, flags), first, second, first_in, second_in);
}
int renameat(int from_at, const char *from, int to_at, const char *to) { return renameat2(from_at, from, to_at, to, 0); }
int rename(const char *from, const char *to) { return renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int unlinkat(int at, const char *path, int flags) {
  char whole[PATH_MAX];
  int in = below(at, path, whole);
  pthread_mutex_lock(&lock);
  return named(UNLINK, syscall(SYS_unlinkat, at, path, flags), whole, NULL, in, 0);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
  char first[PATH_MAX], second[PATH_MAX];
  int first_in = below(from_at, from, first), second_in = below(to_at, to, second);
  pthread_mutex_lock(&lock);
  return named(LINK, syscall(SYS_linkat, from_at, from, to_at, to, flags), first, second, first_in, second_in);
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int mkdirat(int at, const char *path, mode_t mode) {
  char whole[PATH_MAX];
  int in = below(at, path, whole);
  if (in && is_full()) return fail();
  pthread_mutex_lock(&lock);
  return named(MAKE_FOLDER, syscall(SYS_mkdirat, at, path, mode), whole, NULL, in, 0);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

static void sent(const struct iovec *parts, int count) {
  if (journal < 0) return;
  pthread_mutex_lock(&lock);
  put(SEND, 0, 0, NULL, NULL, parts, count, length(parts, count));
  pthread_mutex_unlock(&lock);
}

ssize_t sendmsg(int to, const struct msghdr *message, int flags) {
  sent(message->msg_iov, message->msg_iovlen);
  return syscall(SYS_sendmsg, to, message, flags);
}
ssize_t sendto(int to, const void *data, size_t bytes, int flags, const struct sockaddr *address, socklen_t size) {
  struct iovec part = {(void *)data, bytes};
  sent(&part, 1);
  return syscall(SYS_sendto, to, data, bytes, flags, address, size);
}
ssize_t send(int to, const void *data, size_t bytes, int flags) { return sendto(to, data, bytes, flags, NULL, 0); }
