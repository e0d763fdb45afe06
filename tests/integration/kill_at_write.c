/* Count the system calls of a process group that change files below KILL_ROOT; kill the group at call
 * KILL_AT. The counter is in the file KILL_COUNTER, shared by all processes. A write is torn: its first
 * half reaches the file. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Return whether this call is the fatal one. */
static int counted(const char *path)
{
	const char *root = getenv("KILL_ROOT"), *file = getenv("KILL_COUNTER"), *at = getenv("KILL_AT");
	if (!root || !file || !at || strncmp(path, root, strlen(root)))
		return 0;
	int descriptor = open(file, O_RDWR);
	if (descriptor < 0)
		abort();
	long *counter = mmap(NULL, sizeof(long), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
	long number = __sync_add_and_fetch(counter, 1);
	munmap(counter, sizeof(long));
	close(descriptor);
	return number == atol(at);
}

static int counted_descriptor(int descriptor)
{
	char link[64], path[PATH_MAX];
	snprintf(link, sizeof(link), "/proc/self/fd/%d", descriptor);
	ssize_t size = readlink(link, path, sizeof(path) - 1);
	if (size < 0)
		return 0;
	path[size] = 0;
	return counted(path);
}

static void die(void)
{
	kill(0, SIGKILL);
	pause();
}

ssize_t write(int descriptor, const void *data, size_t size)
{
	if (counted_descriptor(descriptor)) {
		REAL(write)(descriptor, data, size / 2);
		die();
	}
	return REAL(write)(descriptor, data, size);
}

int fsync(int descriptor)
{
	if (counted_descriptor(descriptor))
		die();
	return REAL(fsync)(descriptor);
}

int ftruncate64(int descriptor, off64_t size)
{
	if (counted_descriptor(descriptor))
		die();
	return REAL(ftruncate64)(descriptor, size);
}

int rename(const char *from, const char *to)
{
	if (counted(to))
		die();
	return REAL(rename)(from, to);
}

int unlink(const char *path)
{
	if (counted(path))
		die();
	return REAL(unlink)(path);
}

int rmdir(const char *path)
{
	if (counted(path))
		die();
	return REAL(rmdir)(path);
}

int mkdir(const char *path, mode_t mode)
{
	if (counted(path))
		die();
	return REAL(mkdir)(path, mode);
}
