"""How does trimtab run one of its processes: files, threads, signals, children, and private data in texts?"""
