#!/bin/bash
# PID 1 of one host, in namespaces of its own: makes its file system, starts its sshd, then reaps orphans for ever.
#
#   init.sh NAME FOLDER LAB_ROOT READY_FD
#
# FOLDER holds what is this host's alone; LAB_ROOT/paths lists what all hosts see, one `ro|rw PATH` per line.
# When the host is up, one line goes to READY_FD: its pid and start time as the machine outside sees them.
set -eu
name=$1 folder=$2 lab_root=$3 ready_fd=$4

read -ra stat </proc/self/stat # /proc is still the one of the machine, so these are its numbers
mount --make-rprivate /
echo "$name" >/proc/sys/kernel/hostname

# The mounts below hide /root, /tmp, /run and more. What must stay visible waits on the stage meanwhile.
stage=$lab_root/stage
mount -t tmpfs stage "$stage"
modes=() paths=()
while read -r mode path; do
    mkdir "$stage/${#paths[@]}"
    mount --rbind "$path" "$stage/${#paths[@]}"
    modes+=("$mode") paths+=("$path")
done <"$lab_root/paths"

mount -t proc proc /proc
if [ -e /sys/fs/cgroup ]; then
    mkdir "$stage/cgroup"
    mount --rbind /sys/fs/cgroup "$stage/cgroup"
    mount -t sysfs sysfs /sys # the network devices of this host
    mount --rbind "$stage/cgroup" /sys/fs/cgroup
else
    mount -t sysfs sysfs /sys
fi
mount -t tmpfs run /run
mount -t tmpfs shm /dev/shm
mount --bind "$folder/home" /root
mount --bind "$folder/tmp" /tmp
mount --bind "$folder/var_tmp" /var/tmp
mount --bind "$folder/log" /var/log
mount --bind "$folder/ssh" /etc/ssh
mount --bind "$lab_root/etc_hosts" /etc/hosts
mount --bind "$lab_root/etc_shadow" /etc/shadow
if [ -f /etc/resolv.conf ]; then # no name server: looking up a strange name fails at once
    mount --bind /dev/null /etc/resolv.conf
fi
mount -o remount,bind,ro /

for i in "${!paths[@]}"; do
    mkdir -p "${paths[i]}"
    mount --rbind "$stage/$i" "${paths[i]}"
    mount -o "remount,bind,${modes[i]}" "${paths[i]}"
done
umount --lazy "$stage"
mount -t tmpfs -o ro hidden "$lab_root/hosts" # nobody looks into the home folder of another host

cd /
mkdir /run/sshd
/usr/sbin/sshd -E /var/log/sshd.log
echo "${stat[0]} ${stat[21]}" >&"$ready_fd"
exec {ready_fd}>&-

# A read that never ends, from a pipe that nobody writes to: bash reaps each orphan when it dies, without a child
# of its own such as `sleep` in the process list.
exec {never}<> <(:)
while :; do read -r -u "$never" || :; done
