"""How does the stock stack load a model: transformers, bitsandbytes and PEFT?"""
