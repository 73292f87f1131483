"""The doctor: the environment, known bugs of other packages, cases tried one by one, drafts of issues."""
