export PYTHONPATH=$PWD:$PYTHONPATH PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
B="python profiling/bench/prompts_bench.py --output $OUT/h200_prompts.json"
for c in task=dpo,prompt=7168 task=dpo,prompt=7168,class_type=trl,checkpointing=selective task=dpo,prompt=7168,class_type=trl,checkpointing=layers; do
timeout 100 $B --repeats 2 --case $c 2>&1 | grep -v -i warn | cut -c1-600 | tail -5; date; done
timeout 150 $B --repeats 1 --case task=dpo_loss,prompt=130048,rank=0 2>&1 | cut -c1-600| tail -4; date
timeout 150 $B --repeats 1 --case task=sft_loss,prompt=130048,rank=0 2>&1 | cut -c1-600| tail -4; date
