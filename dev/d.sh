export PYTHONPATH=$PWD:$PYTHONPATH PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
B="python profiling/bench/prompts_bench.py --output $OUT/h200_prompts.json --repeats 1"
G=task=grpo,preset=qwen3-8b,prompt=32768,answer=4096,answers=8,rank=0
timeout 150 $B --case $G,gpu_gib=22 2>&1 | grep -v -i warn | cut -c1-700 | tail -9; date
timeout 60 python -m pytest -q -q -p no:cacheprovider tests/run/test_loop.py -m gpu 2>&1 | grep -E "^E|passed|FAILED"| tail -8; date
timeout 100 $B --case task=dpo,class_type=trl,checkpointing=layers 2>&1 | grep -v -i warn | cut -c1-600 | tail -1; date
