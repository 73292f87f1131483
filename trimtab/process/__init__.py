"""How does one process of ours run: its files, threads, signals and children, and what may its texts say?"""
