/* Disturb the system calls of a process that change files. A preloaded library; a write that is disturbed
 * is torn: its first half reaches the file.
 *
 * KILL_ROOT, KILL_COUNTER, KILL_AT: count the calls below the folder KILL_ROOT, in the file KILL_COUNTER,
 * which all processes share; kill the process group of the caller at call KILL_AT.
 * FAIL_PATH, FAIL_AT, FAIL_ERRNO: calls of a process on files that match the pattern FAIL_PATH fail with
 * FAIL_ERRNO from call FAIL_AT on. Opening and removing a file fail on a read-only file system only (EROFS). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

enum fault { NONE, KILL, FAIL };

/* Return whether this call is the fatal one. */
static int is_fatal(const char *path)
{
	const char *root = getenv("KILL_ROOT"), *file = getenv("KILL_COUNTER"), *at = getenv("KILL_AT");
	if (!root || !file || !at || strncmp(path, root, strlen(root)))
		return 0;
	int descriptor = REAL(open)(file, O_RDWR);
	if (descriptor < 0)
		abort();
	long *counter = mmap(NULL, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
	long number = __sync_add_and_fetch(counter, 1);
	munmap(counter, sizeof(long));
	close(descriptor);
	return number == atol(at);
}

/* Return whether this call fails; errno is set. */
static int fails(const char *path, int needs_no_space)
{
	static long calls;
	const char *pattern = getenv("FAIL_PATH"), *at = getenv("FAIL_AT"), *code = getenv("FAIL_ERRNO");
	if (!pattern || !at || !code || (needs_no_space && atoi(code) != EROFS) || fnmatch(pattern, path, 0))
		return 0;
	if (__sync_add_and_fetch(&calls, 1) < atol(at))
		return 0;
	errno = atoi(code);
	return 1;
}

static enum fault fault_of(const char *path, int needs_no_space)
{
	return is_fatal(path) ? KILL : fails(path, needs_no_space) ? FAIL : NONE;
}

static enum fault fault_of_descriptor(int descriptor)
{
	char link[64], path[PATH_MAX];
	snprintf(link, sizeof(link), "/proc/self/fd/%d", descriptor);
	ssize_t size = readlink(link, path, sizeof(path) - 1);
	if (size < 0)
		return NONE;
	path[size] = 0;
	return fault_of(path, 0);
}

static int disturb(enum fault fault)
{
	if (fault == KILL) {
		kill(0, SIGKILL);
		pause();
	}
	return -1;
}

ssize_t write(int descriptor, const void *data, size_t size)
{
	enum fault fault = fault_of_descriptor(descriptor);
	if (fault) {
		int code = errno;
		REAL(write)(descriptor, data, size / 2);
		errno = code;
		return disturb(fault);
	}
	return REAL(write)(descriptor, data, size);
}

/* Define a call that has no effect if it is disturbed. */
#define CALL(name, place, parameters, arguments)                                                           \
	int name parameters                                                                                \
	{                                                                                                  \
		enum fault fault = place;                                                                  \
		return fault ? disturb(fault) : REAL(name) arguments;                                      \
	}

CALL(fsync, fault_of_descriptor(descriptor), (int descriptor), (descriptor))
CALL(ftruncate64, fault_of_descriptor(descriptor), (int descriptor, off_t size), (descriptor, size))
CALL(rename, fault_of(to, 0), (const char *from, const char *to), (from, to))
CALL(mkdir, fault_of(path, 0), (const char *path, mode_t mode), (path, mode))
CALL(unlink, fault_of(path, 1), (const char *path), (path))
CALL(rmdir, fault_of(path, 1), (const char *path), (path))

int open64(const char *path, int flags, ...)
{
	va_list rest;
	va_start(rest, flags);
	mode_t mode = va_arg(rest, mode_t);
	va_end(rest);
	if (flags & (O_WRONLY | O_RDWR | O_CREAT) && fails(path, 1))
		return -1;
	return REAL(open64)(path, flags, mode);
}
