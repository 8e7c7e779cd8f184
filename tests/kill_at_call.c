// Preloaded into a server: SIGKILL at a chosen call that changes its state folder, or a list of those calls.
//   KILL_STATE  the folder
//   KILL_LOG    a file that takes a line for each such call ("pwritev journal"), or the one of the kill
//   KILL_AT     "<line>\t<n>\t<how>": at the n-th such call; before it, after half of its bytes, or after it
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NEVER, BEFORE, HALF, AFTER };

static void* real(const char* name) { return dlsym(RTLD_NEXT, name); }

static void say(const char* line) {
  ssize_t (*next)(int, const void*, size_t) = real("write");
  const int file = open(getenv("KILL_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || next(file, line, strlen(line)) < 0) abort();
  close(file);
}

// Of a path the last name counts, without digits, which differ from run to run.
static int when(const char* call, const char* path) {
  const char *state = getenv("KILL_STATE"), *at = getenv("KILL_AT");
  if (!state || strncmp(path, state, strlen(state)) != 0 || path[strlen(state)] != '/') return NEVER;
  char line[PATH_MAX + 64];
  char* to = line + sprintf(line, "%s %s", call, strstr(path, "/checkpoints/") ? "checkpoints/" : "");
  const char* name = strrchr(path, '/') + 1;
  if (strchr(name, '~')) name = "<name>";
  for (; *name; ++name)
    if (*name < '0' || *name > '9') *to++ = *name;
  strcpy(to, "\n");
  if (!at) {
    say(line);
    return NEVER;
  }
  const size_t length = strcspn(at, "\t");
  if ((size_t)(to - line) != length || strncmp(line, at, length) != 0) return NEVER;
  static atomic_int calls;
  char* how;
  if (atomic_fetch_add(&calls, 1) + 1 != strtol(at + length, &how, 10)) return NEVER;
  say(line);
  return strcmp(how, "\thalf") == 0 ? HALF : strcmp(how, "\tafter") == 0 ? AFTER : BEFORE;
}

static int when_file(const char* call, int file) {
  char link[64], path[PATH_MAX];
  sprintf(link, "/proc/self/fd/%d", file);
  const ssize_t length = readlink(link, path, sizeof(path) - 1);
  path[length < 0 ? 0 : length] = 0;
  return when(call, path);
}

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

// Half of a call that writes no bytes is nothing.
#define AS(type, at, half, ...)            \
  const int at_ = at;                      \
  if (at_ == HALF) (void)(half);           \
  if (at_ == BEFORE || at_ == HALF) die(); \
  const type result = next(__VA_ARGS__);   \
  if (at_ == AFTER) die();                 \
  return result

ssize_t write(int file, const void* from, size_t bytes) {
  ssize_t (*next)(int, const void*, size_t) = real("write");
  AS(ssize_t, when_file("write", file), next(file, from, bytes / 2), file, from, bytes);
}

ssize_t pwrite(int file, const void* from, size_t bytes, off_t at) {
  ssize_t (*next)(int, const void*, size_t, off_t) = real("pwrite");
  AS(ssize_t, when_file("pwrite", file), next(file, from, bytes / 2, at), file, from, bytes, at);
}

ssize_t pwritev(int file, const struct iovec* parts, int count, off_t at) {
  ssize_t (*next)(int, const struct iovec*, int, off_t) = real("pwritev");
  struct iovec first[2] = {parts[0], parts[count - 1]};  // the journal has two: a header and a record
  first[1].iov_len /= 2;
  AS(ssize_t, when_file("pwritev", file), next(file, first, 2, at), file, parts, count, at);
}

int ftruncate(int file, off_t length) {
  int (*next)(int, off_t) = real("ftruncate");
  AS(int, when_file("ftruncate", file), 0, file, length);
}

int fsync(int file) {
  int (*next)(int) = real("fsync");
  AS(int, when_file("fsync", file), 0, file);
}

int fdatasync(int file) {
  int (*next)(int) = real("fdatasync");
  AS(int, when_file("fdatasync", file), 0, file);
}

int rename(const char* from, const char* to) {
  int (*next)(const char*, const char*) = real("rename");
  AS(int, when("rename", to), 0, from, to);
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  int (*next)(int, const char*, int, const char*, unsigned) = real("renameat2");
  AS(int, when("renameat2", to), 0, from_folder, from, to_folder, to, flags);
}

int link(const char* from, const char* to) {
  int (*next)(const char*, const char*) = real("link");
  AS(int, when("link", to), 0, from, to);
}

int mkdir(const char* path, mode_t mode) {
  int (*next)(const char*, mode_t) = real("mkdir");
  AS(int, when("mkdir", path), 0, path, mode);
}

int unlinkat(int folder, const char* name, int flags) {
  int (*next)(int, const char*, int) = real("unlinkat");
  char path[PATH_MAX * 2] = "", link[64];
  sprintf(link, "/proc/self/fd/%d", folder);
  const ssize_t length = readlink(link, path, PATH_MAX - 1);
  if (length > 0 && *name != '/') sprintf(path + length, "/%.1000s", name);
  AS(int, when("unlinkat", *name == '/' ? name : path), 0, folder, name, flags);
}
