# Tab completion for bash of `runner …` and `python -m runner …`: source this file, for example in ~/.bashrc.
# It reads the names of option files, and starts no Python. Where nothing else fits, bash completes paths.

_runner_package=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

_runner() {
    local line=${COMP_LINE:0:COMP_POINT} words=() word="" before="" start=1 own="" found="" group value prefix conf file
    COMPREPLY=()
    read -ra words <<<"$line"
    [[ ${words[0]##*/} == python* ]] && start=3
    if ((start == 3)) && [[ ${words[*]:1:2} != "-m runner" ]]; then return; fi
    [[ $line != *[[:space:]] ]] && word=${words[-1]} && unset "words[-1]"
    before=${words[-1]}
    for ((i = start; i < ${#words[@]}; i++)); do
        case ${words[i]} in
        --config-dir=*) own=${words[i]#*=} ;;
        --config-dir | -cd) own=${words[i + 1]} ;;
        esac
    done
    conf=$_runner_package/conf
    [[ -d $conf ]] || conf=$_runner_package/../conf

    if [[ $before == --config-dir || $before == -cd || $before == --run-directory ]]; then
        return
    elif [[ $word == *=* ]]; then # GROUP=OPTION or GROUP=OPTION,OPTION
        group=${word%%=*} value=${word#*=}
        [[ $value == *,* ]] && prefix=${value%,*},
        for file in "$conf/$group"/[!_]*.yaml ${own:+"${own/#\~/$HOME}/$group"/[!_]*.yaml}; do
            [[ -f $file ]] && file=${file##*/} && found+=" ${file%.yaml}"
        done
        word=${value##*,}
    elif [[ ${words[start]} =~ ^(compare|convert|doctor|evaluate|play|plot|predict|runs|sweep)$ ]]; then
        [[ $word == -* ]] || return # paths
        found=--help
    elif [[ $word == -* ]]; then
        found="--config-dir --help"
        [[ ${words[start]} =~ ^(plan|tune|verify)$ ]] || found+=" --version --multirun --summary --run-directory --cfg"
    else
        for file in "$conf"/*/ ${own:+"${own/#\~/$HOME}"/*/}; do
            [[ -d $file ]] && file=${file%/} && found+=" ${file##*/}="
        done
        if ((${#words[@]} == start)); then
            found+=" doctor plan tune verify sweep runs compare plot evaluate predict play convert"
        fi
    fi
    mapfile -t COMPREPLY < <(compgen -P "$prefix" -W "$found" -- "$word")
    [[ ${COMPREPLY[*]} == *= ]] && compopt -o nospace 2>/dev/null
}

complete -o bashdefault -o default -F _runner runner python python3
