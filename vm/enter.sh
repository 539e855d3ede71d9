#!/bin/sh
# enter.sh ROOT CHANGES PACKAGES BOOT_ID, in new namespaces: becomes the systemd of a machine. CHANGES is a folder with
# the folders changes, work and root; ROOT is what is below it, one or several folders with colons between them.
set -e
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/changes,workdir=$2/work" "$2/root"
cd "$2/root"
mount -t proc proc proc
mount --bind "$4" proc/sys/kernel/random/boot_id
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=755 tmpfs dev
for device in null:1:3 zero:1:5 full:1:7 random:1:8 urandom:1:9 tty:5:0; do
  number=${device#*:}
  mknod -m 666 "dev/${device%%:*}" c "${number%:*}" "${number#*:}"
done
mkdir dev/pts dev/shm old
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for stream in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${stream%:*}" "dev/${stream#*:}"; done
mount --bind "$3" mnt
pivot_root . old
umount -l /old
rmdir /old
exec env -i container=lab PATH=/usr/sbin:/usr/bin:/sbin:/bin /sbin/init --show-status=0 --log-target=null \
  systemd.unified_cgroup_hierarchy=1
