"""The program that launches one Apptainer sandbox, from its control groups to the control shell.

It is forked from `fork_server`, or runs on its own as `python -I -S -c COMMAND APPTAINER ARGUMENTS...`; what it needs
is loaded as late as possible for the latter. Every mount, and the network, belongs to namespaces of this process and
ends with the sandbox's last process. As root it drops root before anything of the image runs. Its rights in its own
user namespace end there too, and that namespace allows no other below Apptainer's, so code inside cannot make one to
gain rights in.

These variables are its instructions:
  LAUNCH_GATE         a descriptor to read a byte from, which comes once this process is in its control groups
  LAUNCH_SPACE        a folder for the sandbox's files ("data"), its /sys, /dev/shm and /etc/hosts, and Apptainer's
                      own settings ("conf")
  LAUNCH_NAMESPACES   "1": a user namespace with mounts in it; without it an ordinary user gets neither
  LAUNCH_UIDS, LAUNCH_GIDS  ranges "FIRST COUNT" of this user's subordinate ids: with them, code inside is root in a
                      user namespace that maps them, and Apptainer needs no other
  LAUNCH_NETWORK      "1": a separate network, whose loopback is up
  LAUNCH_IMAGE        the image, shown at "image" in LAUNCH_SPACE
  LAUNCH_OVERLAY      "notes" or "plain": a writable overlay on the image, at "root" in LAUNCH_SPACE, with or without
                      notes on folders of the image that were removed
  LAUNCH_LAYERS       what other sandboxes wrote, to lie between the image and the overlay, newest first: for each
                      a line "MOUNTS USERS OWNER SPACE" with descriptors of its mount and user namespaces (-1: the
                      host's users), the owner of its files, and its LAUNCH_SPACE
  LAUNCH_SAVED        an archive of what the sandbox begins with, see `saved_files`
  LAUNCH_POINTS       paths inside that Apptainer mounts something on, one per line; a folder ends with "/"
  LAUNCH_LISTENER     a descriptor of a Unix socket that listening sockets of that network are sent to
  LAUNCH_PORTS        the ports they listen on, on 127.0.0.1
  LAUNCH_BYTES        the size of the file system that LAUNCH_SPACE gets; without mounts, the limit on each file
  LAUNCH_FILTER       the system call filter in hexadecimal digits, see `seccomp`
  LAUNCH_PROFILE      the same for Apptainer to set, as JSON, which it finds at "filter.json" in LAUNCH_SPACE
  LAUNCH_DIRECT       the image among the arguments: do what Apptainer would do with them on the overlay, and do not run
                      it; see `container`
  LAUNCH_ORIGINAL     with LAUNCH_DIRECT, the program inside that the command's, in /dev/shm, is a copy of
  INSIDE_NAME         with LAUNCH_DIRECT, the variable NAME inside
  FILE_PATH           with LAUNCH_DIRECT, the content of the file PATH inside
and as root:
  LAUNCH_USER, LAUNCH_GROUP  the user and group to become
  LAUNCH_OWNER               another id for that user: the owner of its files on disk, and its id inside
  LAUNCH_BINDS               other paths to show, one per line, at "bind0", "bind1" ... in LAUNCH_SPACE
"""
